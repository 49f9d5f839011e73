"""One governor for each device, so that a shortage costs only models on the device that is short.

A *device* is memory with a budget of its own. A machine has one device if its accelerator shares
the main memory, or if it has no accelerator. A host with several GPUs has one device for each. All
devices have the same budget. A model is charged to the device of its policy. The ranks of a gang
are on that device and the next ones, or all on the only device.

Workers report bytes as sums over all their ranks, and their grants are such sums too. A governor
counts only the bytes on one device. A gang's ranks hold equal parts, so the numbers of all its
devices are equal. Their governors share its account and grant its requests together
(`Ledger.peers`).

If devices have memory of their own, one more governor has a ledger of the host's memory. A load
requests `HOST_BYTES` for each of its processes there, and only then memory of its devices. No model
grows in the host's memory, so a model with memory of a device never waits for the host, and no two
models wait for each other. Measured bytes above this charge are excess. Memory that a worker frees
on its device does not help the host; only the end of the worker does. The accounts of this governor
therefore have nothing to reclaim except whole idle models. The system's memory pressure is about
the host's memory alone. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import msgspec
from msgspec.structs import replace

from actors.machines import governor_events as ev
from actors.machines.governor import Governor
from actors.machines.ledger import GrantDecision, Ledger, MemoryRequest, WorkerExited
from protocol.device import DeviceStatus
from protocol.memory_bounds import HOST_BYTES
from protocol.types import Reclaimable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actors.machines.model_accounts import ModelAccount
    from protocol.policy import ModelPolicy


class Governors(msgspec.Struct):
    """The governors of all devices."""

    devices: list[Governor]
    places: dict[str, tuple[int, ...]] = {}
    """For each model with an account, the devices of its ranks."""
    host: Governor | None = None
    """Governor of the host's memory, if devices have memory of their own."""
    loads: dict[str, MemoryRequest] = {}
    """By model, the request of a load whose processes wait for the host's memory."""

    @classmethod
    def create(
        cls, budget_bytes: int, devices: int = 1, host_bytes: int | None = None
    ) -> Governors:
        """Return governors of this many devices, which have ``budget_bytes`` each.

        ``host_bytes``: bytes of the host's memory that workers may use, if devices have memory of
        their own.
        """
        exempt: set[str] = set()
        ledgers = [Ledger(budget_bytes, exempt=exempt) for _ in range(devices)]
        governors = [
            Governor(ledger, None if devices == 1 else number)
            for number, ledger in enumerate(ledgers)
        ]
        if host_bytes is None:
            return cls(governors)
        return cls(governors, host=Governor(Ledger(host_bytes), memory="host memory"))

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        if self.host is None:
            return self._handle_on_devices(event, now)
        commands: list[ev.Command] = []
        if (
            isinstance(event, MemoryRequest)
            and event.model not in self.host.ledger.grants
            and event.total_bytes <= self.limit_of(event.model)  # else its devices refuse it
        ):
            self.loads[event.model] = event
        else:
            commands += self._handle_on_devices(event, now)
        commands += self._handle_on_host(self.host, event, now)
        return [it for it in commands if not self._is_still_held(it)]

    def _handle_on_devices(self, event: ev.Event, now: float) -> list[ev.Command]:
        match event:
            case ev.BudgetChanged() | ev.AlarmFired():
                parts = [it.handle(event, now) for it in self.devices]
            case ev.MemoryMeasured():
                parts = [it.handle(self._measured_on(it, event), now) for it in self.devices]
            case _:
                parts = []
                if isinstance(event, ev.LoadRequested):
                    parts.append(self._place(event.model, event.policy))
                first, *others = self.of(event.model)
                parts.append(first.handle(self._on_one_device(event), now))
                parts += [it.react(now) for it in others]
                if isinstance(event, ev.ModelRemoved):
                    self._forget(event.model)
        commands = [self._of_all_ranks(command) for part in parts for command in part]
        self._note_evictions(commands)
        return commands

    def _handle_on_host(self, host: Governor, event: ev.Event, now: float) -> list[ev.Command]:
        if isinstance(event, WorkerExited | ev.ModelRemoved):
            self.loads.pop(event.model, None)
        commands: list[ev.Command] = []
        for command in host.handle(self._on_host(event), now):
            match command:
                case GrantDecision(model=model):
                    request = self.loads.pop(model, None)
                    if request is not None and command.granted:
                        commands += self._handle_on_devices(request, now)
                    elif request is not None:
                        commands.append(replace(command, host_bytes=self._host_bytes(model)))
                case _:
                    commands.append(command)
        self._note_evictions(commands)
        return commands

    def _on_host(self, event: ev.Event) -> ev.Event:
        """Return an event as the governor of the host's memory gets it."""
        match event:
            case MemoryRequest(model=model) if model in self.loads:
                return replace(event, total_bytes=self._host_bytes(model))
            case ev.ReclaimableReported(reclaimable=it):
                return replace(event, reclaimable=Reclaimable(rows=it.rows, waiting=it.waiting))
            case ev.MemoryMeasured():
                used = {model: self._beyond_charge(model, n) for model, n in event.host.items()}
                return ev.MemoryMeasured(used, event.pressure)
            case MemoryRequest() | ev.ReclaimFinished() | ev.BudgetChanged():
                return ev.AlarmFired()
        return event

    def _host_bytes(self, model: str) -> int:
        """Return the charge for all processes of a model in the host's memory."""
        account = None if self.host is None else self.host.accounts.get(model)
        return HOST_BYTES * (1 if account is None else account.policy.ranks)

    def _beyond_charge(self, model: str, used: int) -> int:
        """Return what counts as used. Before its grant, what a load uses is part of its charge."""
        if self.host is None or model in self.host.ledger.grants:
            return used
        return max(0, used - self._host_bytes(model))

    def _note_evictions(self, commands: list[ev.Command]) -> None:
        """Record that models are being unloaded in the accounts of the other governors as well."""
        for command in commands:
            if self.host is not None and isinstance(command, ev.Evict):
                for it in (self.host, self.of(command.model)[0]):
                    it.accounts[command.model].state = "leaving"

    def _is_still_held(self, command: ev.Command) -> bool:
        """Return whether a command releases a model that another governor still holds."""
        if not isinstance(command, ev.HoldRequests) or command.held or self.host is None:
            return False
        return any(command.model in it.held for it in (self.host, *self.of(command.model)))

    def of(self, model: str) -> list[Governor]:
        """Return the governors of a model's devices; of an unknown model, that of the first one."""
        return [self.devices[number] for number in self.places.get(model, (0,))]

    def account(self, model: str) -> ModelAccount | None:
        return self.of(model)[0].accounts.get(model)

    @property
    def deadline(self) -> float | None:
        times = [it.deadline for it in self.devices if it.deadline is not None]
        if self.host is not None and self.host.deadline is not None:
            times.append(self.host.deadline)
        return min(times, default=None)

    @property
    def budget_bytes(self) -> int:
        """Bytes of each device that models may use."""
        return self.devices[0].ledger.budget_bytes

    @property
    def granted_bytes(self) -> int:
        return sum(it.ledger.granted_bytes for it in self.devices)

    @property
    def most_granted_bytes(self) -> int:
        """Bytes granted on the device that has granted most."""
        return max(it.ledger.granted_bytes for it in self.devices)

    def granted_to(self, model: str) -> int:
        """Return the bytes that all ranks of a model may hold."""
        governors = self.of(model)
        return sum(it.ledger.grants.get(model, 0) for it in governors)

    def budget_of(self, model: str) -> int:
        """Return the budget of all devices of a model."""
        return len(self.of(model)) * self.budget_bytes

    def budget_for(self, policy: ModelPolicy) -> int:
        """Return the budget of all devices that a model would be charged to."""
        return len(devices_of(policy, len(self.devices))) * self.budget_bytes

    def statuses(self) -> list[DeviceStatus]:
        return [_status(governor.ledger) for governor in self.devices]

    def host_status(self) -> DeviceStatus | None:
        """Return the status of the host's memory, if devices have memory of their own."""
        return None if self.host is None else _status(self.host.ledger)

    def limit_of(self, model: str) -> int:
        """Return the most bytes that all ranks of a model can have."""
        governors = self.of(model)
        return len(governors) * governors[0].limit_of(model)

    def waiting_loads(self) -> Iterator[str]:
        """Yield the models whose load waits for a grant."""
        yield from self.loads
        for model in self.places:
            governor = self.of(model)[0]
            if model in governor.ledger.waiting and governor.accounts[model].state == "loading":
                yield model

    def check(self) -> None:
        for number, governor in enumerate(self.devices):
            governor.check()
            for model, account in governor.accounts.items():
                places = self.places.get(model, ())
                assert number in places, "an account of another device's model"
                assert account is self.account(model), "two accounts of a model"
        if self.host is not None:
            self.host.check()
            assert set(self.loads) <= set(self.host.ledger.waiting), "a load that does not wait"
        for model, places in self.places.items():
            granted = {self.devices[it].ledger.grants.get(model, 0) for it in places}
            assert len(granted) == 1, "ranks with different grants"

    def _place(self, model: str, policy: ModelPolicy) -> list[ev.Command]:
        """Charge a model that is about to be loaded to the devices of its policy.

        If it is held for a request on the devices that it leaves, release it.
        """
        places = devices_of(policy, len(self.devices))
        if self.places.get(model) == places:
            return []
        was_held = any(model in it.held for it in self.of(model))
        account = self.account(model)
        self._forget(model)
        self.places[model] = places
        governors = self.of(model)
        account = account or governors[0].account(model)
        for it in governors:
            it.accounts[model] = account
            it.peers[model] = tuple(other for other in governors if other is not it)
            it.ledger.peers[model] = tuple(other.ledger for other in it.peers[model])
        return [ev.HoldRequests(model, held=False)] if was_held else []

    def _forget(self, model: str) -> None:
        for it in self.of(model):
            it.accounts.pop(model, None)
            it.held.discard(model)
            it.peers.pop(model, None)
            it.ledger.peers.pop(model, None)
        self.places.pop(model, None)

    def _parts(self, model: str) -> int:
        return len(self.places.get(model, (0,)))

    def _measured_on(self, governor: Governor, event: ev.MemoryMeasured) -> ev.MemoryMeasured:
        """Return the measurements of the models whose first rank is on a governor's device."""
        pressure = event.pressure if self.host is None else "normal"
        if len(self.devices) == 1:
            return event if self.host is None else replace(event, pressure=pressure)
        used = {
            model: nbytes // self._parts(model)
            for model, nbytes in event.used.items()
            if self.of(model)[0] is governor
        }
        return replace(event, used=used, pressure=pressure)

    def _on_one_device(self, event: ev.Event) -> ev.Event:
        """Return a model's event with the bytes of one device."""
        match event:
            case ev.LoadRequested(policy=policy) | ev.PolicyChanged(policy=policy):
                ranks = max(1, policy.ranks // self._parts(event.model))
                return replace(event, policy=replace(policy, ranks=ranks))
        parts = self._parts(getattr(event, "model", ""))
        if parts == 1:
            return event
        match event:
            case MemoryRequest(total_bytes=total):
                return replace(event, total_bytes=-(-total // parts))
            case ev.ReclaimFinished(freed_bytes=freed):
                return replace(event, freed_bytes=freed // parts)
            case ev.ReclaimableReported(reclaimable=reclaimable):
                return replace(event, reclaimable=_divided(reclaimable, parts))
        return event

    def _of_all_ranks(self, command: ev.Command) -> ev.Command:
        """Return a command for a model with the bytes of all its ranks."""
        parts = self._parts(command.model)
        if parts == 1:
            return command
        match command:
            case GrantDecision(total_bytes=total, available_bytes=available):
                return replace(
                    command, total_bytes=parts * total, available_bytes=parts * available
                )
            case ev.Reclaim(wanted_bytes=wanted):
                return replace(command, wanted_bytes=parts * wanted)
            case ev.EndWorker(used_bytes=used, limit_bytes=limit):
                return replace(command, used_bytes=parts * used, limit_bytes=parts * limit)
        return command


def devices_of(policy: ModelPolicy, devices: int) -> tuple[int, ...]:
    """Return the devices that a model is charged to, on a machine with this many."""
    if devices == 1:
        return (0,)
    return tuple(range(policy.device, policy.device + policy.ranks))


def _status(ledger: Ledger) -> DeviceStatus:
    return DeviceStatus(budget_bytes=ledger.budget_bytes, granted_bytes=ledger.granted_bytes)


def _divided(reclaimable: Reclaimable, parts: int) -> Reclaimable:
    """Return what each of a model's devices would get back."""
    counts = ("rows", "waiting", "level")
    values = msgspec.structs.asdict(reclaimable)
    shares = {key: value // parts for key, value in values.items() if isinstance(value, int)}
    shares |= {key: values[key] for key in counts}
    levels = tuple(nbytes // parts for nbytes in cast("tuple[int, ...]", values["levels"]))
    return replace(reclaimable, **{**shares, "levels": levels})
