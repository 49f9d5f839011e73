"""The part of the split kernel that sums values, multiplied with the weights of their tokens.

If values are quantized per token, lane ``RUNS * pass + run`` reads eight channels of every token
assigned to its ``pass``, and keeps the channels' sums in registers. Values that are quantized per
channel are read like keys, with a sum per channel and lane.
"""

from __future__ import annotations

from kvd.worker.attention.kernels.shape import LANES, Shape
from kvd.worker.attention.kernels.text import RUN, Text, power
from kvd.worker.attention.kernels.unpacking import Run, dense_run, find_run
from kvd.worker.cache.scheme import PAGE_TOKENS

_PLAIN_WEIGHTS = """
work[base + token] = score0;
work[base + token + 1] = score1;
SYNC_WARP();
"""


class Values:
    """Writes the text of this part.

    Packed numbers arrive multiplied by powers of two (`Run.shifts`), so their sums are scaled, too.
    The kernel's ``form`` says which scaling is in force; 0: none.
    """

    def __init__(self, text: Text, shape: Shape, fold: int, unfold: int) -> None:
        self._text = text
        self._shape = shape
        self._fold = fold
        self._unfold = unfold
        runs = shape.v_dim // RUN
        self.at_once = LANES // runs
        """Tokens that a warp reads at once."""
        shifts = (side.run(shape.dtype).shifts for _, side in shape.by_token)
        self._forms = list(dict.fromkeys(shifts))
        """Scalings that occur, numbered from 1: for each channel of a run, a power of two."""

    @property
    def spreads(self) -> list[tuple[str, int, int]]:
        """Sums of biases, one per group of channels: name, first channel, index after the last."""
        return [
            (f"spread{level}_{group}", group * side.group, (group + 1) * side.group)
            for level, side in self._shape.by_token
            for group in range(side.groups(self._shape.v_dim))
        ]

    @property
    def sums(self) -> list[str]:
        """Names of all vectors that a lane keeps."""
        return [f"sum{number}" for number in range(RUN)] + [name for name, *_ in self.spreads]

    def declare(self) -> None:
        self._text.zero(*self.sums)
        if self._forms:
            self._text.add("int form = 0;  // by what sums are raised")
        if self._shape.by_channel:
            self._text.add(f"""
{self._text.vector} channel[V_DIM / 4];
#pragma unroll
for (int step = 0; step < V_DIM / 4; ++step) {{
channel[step]@ = 0;
}}
""")

    def add_page(self, level: int) -> None:
        side = self._shape.values[level]
        if not side.packed:
            self._dense(f"values{level} + page * (PAGE * V_DIM)", "PAGE")
        elif side.along_tokens:
            self._by_channel(level)
        else:
            self._by_token(level)

    def add_tail(self) -> None:
        line = "tail_values + ((size_t(tail) * HEADS + head) * TAIL + item * PAGE) * V_DIM"
        self._dense(line, "count")

    def _dense(self, line: str, count: str) -> None:
        run = dense_run(self._shape.dtype)
        self._switch_form(0)
        self._text.add(_PLAIN_WEIGHTS)
        self._text.add(f"GLOBAL {run.kind}* runs = (GLOBAL {run.kind}*)({line});")
        self._over_tokens(run, count, "t")

    def _by_token(self, level: int) -> None:
        side, text = self._shape.values[level], self._text
        run, groups = side.run(self._shape.dtype), side.groups(self._shape.v_dim)
        self._switch_form(self._forms.index(run.shifts) + 1)
        text.add(f"""
GLOBAL T* scales = value_scales{level} + (page * PAGE + token) * {groups};
GLOBAL T* biases = value_biases{level} + (page * PAGE + token) * {groups};
""")
        for which in (0, 1):
            for group in range(groups):
                at = which * groups + group
                text.add(f"""
{{
const float scale = float(scales[{at}]) * {power(self._fold)}, bias = float(biases[{at}]);
{text.vector} weight;
weight@ = score{which}@ * scale;
spread{level}_{group}@ += score{which}@ * bias;
work[base + token * {groups} + {at}] = weight;
}}
""")
        text.add(f"""
SYNC_WARP();
GLOBAL {run.kind}* runs = (GLOBAL {run.kind}*)(values{level})
    + page * (PAGE * RUNS * {run.size} / 4);
""")
        where = "t" if groups == 1 else f"t * {groups} + run / {side.group // RUN}"
        self._over_tokens(run, "PAGE", where)

    def _over_tokens(self, run: Run, count: str, where: str) -> None:
        text, weight = self._text, f"work[base + {where}]"
        first = f"const int t = step * AT_ONCE + pass;\n{text.vector} weight;\n"

        def use(number: int, found: str) -> str:
            return f"sum{number}@ += {found} * weight@;"

        if count == "PAGE" and not (PAGE_TOKENS % self.at_once or self._idle):
            text.add(f"{find_run('lane', run.size)}runs += place;")
            steps = PAGE_TOKENS // self.at_once
            run.add_stream(text, steps, "(AT_ONCE * RUNS)", f"{first}weight = {weight};", use)
            return
        condition = f"t < {count} && pass < AT_ONCE" if self._idle else f"t < {count}"
        text.add(f"""{find_run("run", run.size)}
for (int step = 0; step * AT_ONCE < {count}; ++step) {{
constexpr int from = 0;
{first}
if ({condition}) {{
weight = {weight};
{run.kind} now[{run.count}];
""")
        run.add_read(text, "now", "0", f"t * RUNS * {run.size} / 4 + place")
        run.add_to(text, use)
        text.add("}\n}")

    @property
    def _idle(self) -> bool:
        """Whether some lanes have no channels to sum."""
        return LANES % (self._shape.v_dim // RUN) != 0

    def _by_channel(self, level: int) -> None:
        side, text = self._shape.values[level], self._text
        run, groups = side.run(self._shape.dtype), side.groups(self._shape.v_dim)
        text.add(_PLAIN_WEIGHTS)
        text.zero("all", "found")
        text.each(f"{text.vector} weight$ = work[base + 8 * j + $];\nall@ += weight$@;")
        for number, shift in enumerate(run.shifts):
            text.scale(f"weight{number}", self._fold - shift)
        at = "d" if groups == 1 else f"d * {groups} + j / {side.group // RUN}"
        text.add(f"""{find_run("j", run.size)}
GLOBAL T* scales = value_scales{level} + page * (V_DIM * {groups});
GLOBAL T* biases = value_biases{level} + page * (V_DIM * {groups});
GLOBAL {run.kind}* runs = (GLOBAL {run.kind}*)(values{level}) + page * (V_DIM * 2 * {run.size});
#pragma unroll
for (int step = 0; step < V_DIM / 4; ++step) {{
const int d = step * 4 + c;
constexpr int from = 0;
{run.kind} now[{run.count}];
const float scale = float(scales[{at}]) * {power(self._unfold)}, bias = float(biases[{at}]);
found@ = 0;
""")
        run.add_read(text, "now", "0", f"d * {2 * run.size} + place")
        run.add_to(text, lambda number, number_text: f"found@ += {number_text} * weight{number}@;")
        text.add("channel[step]@ += found@ * scale + all@ * bias;\n}")

    def _switch_form(self, form: int) -> None:
        """Add the code that changes the sums' scaling to ``form``."""
        if not self._forms:
            return
        self._text.add(f"if (form != {form}) {{")
        self.unscale()
        if form:
            for number, shift in enumerate(self._forms[form - 1]):
                self._text.scale(f"sum{number}", shift - self._unfold)
        self._text.add(f"form = {form};\n}}")

    def unscale(self) -> None:
        for form, shifts in enumerate(self._forms, 1):
            self._text.add(f"if (form == {form}) {{")
            for number, shift in enumerate(shifts):
                self._text.scale(f"sum{number}", self._unfold - shift)
            self._text.add("}")

    def gather(self) -> None:
        """Add the code that writes the lanes' sums, times ``share``, into the warp's ``work``."""
        text = self._text
        for name, *_ in self.spreads:
            text.add(f"{name}@ = SUM({name}@);")
        text.add(f"for (int d = lane; d < V_DIM; d += 32) {{\n{text.vector} output;\noutput@ = 0;")
        for name, first, end in self.spreads:
            text.add(f"if (d >= {first} && d < {end}) {{\noutput@ += {name}@ * share@;\n}}")
        text.add("""
work[base + d] = output;
}
for (int turn = 0; turn < AT_ONCE; ++turn) {
SYNC_WARP();
if (turn == pass) {
""")
        text.each("work[base + run * 8 + $]@ += sum$@ * share@;")
        text.add("}\n}")
        if self._shape.by_channel:
            text.add("""
for (int turn = 0; turn < 8; ++turn) {
SYNC_WARP();
if (turn == j) {
#pragma unroll
for (int step = 0; step < V_DIM / 4; ++step) {
work[base + step * 4 + c]@ += channel[step]@ * share@;
}
}
}
""")
