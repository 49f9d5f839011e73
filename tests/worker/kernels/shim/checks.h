// Functions that the compiler's checks (-fsanitize=...) call when they fail. They replace the
// sanitizer library, so that messages name the kernel's line. g++ and clang pass the same structs.
#pragma once

namespace checks {

struct Location {
  const char* file;
  uint32_t line;
  uint32_t column;
};
struct Type {
  uint16_t kind;
  uint16_t about;
  char name[1];
};
struct Bounds {
  Location at;
  const Type* array;
  const Type* index;
};
struct Mismatch {
  Location at;
  const Type* type;
  unsigned char log_alignment;
  unsigned char kind;
};
struct Shift {
  Location at;
  const Type* left;
  const Type* right;
};
struct Overflow {
  Location at;
  const Type* type;
};
struct Cast {
  Location at;
  const Type* from;
  const Type* to;
};

// Numbers of up to 64 bits are passed by value; `about` contains their sign and width.
inline long number(const Type* type, uintptr_t value) {
  unsigned bits = 1u << (type->about >> 1);
  bool sign = type->about & 1;
  return sign && bits < 64 ? long(value << (64 - bits)) >> (64 - bits) : long(value);
}

// Returns the line of the kernel's body, or 0 for a place in a header.
inline uint32_t line(const Location& at) { return strcmp(at.file, "body") ? 0 : at.line; }

} // namespace checks

extern "C" {

void __ubsan_handle_out_of_bounds_abort(checks::Bounds* found, uintptr_t index) {
  fail(checks::line(found->at), nullptr, "index %ld is outside of an array of type %s",
       checks::number(found->index, index), found->array->name);
}

void __ubsan_handle_type_mismatch_v1_abort(checks::Mismatch* found, uintptr_t address) {
  if (address % (uintptr_t(1) << found->log_alignment)) {
    std::string where;
    for (const memory::Buffer& buffer : buffers) {
      auto begin = reinterpret_cast<uintptr_t>(buffer.mapping);
      if (address >= begin && address < begin + buffer.mapped) {
        long offset = long(address - reinterpret_cast<uintptr_t>(buffer.data));
        where = " in buffer '" + buffer.name + "', byte " + std::to_string(offset);
      }
    }
    fail(checks::line(found->at), nullptr, "misaligned access%s: type %s needs a multiple of %u",
         where.c_str(), found->type->name, 1u << found->log_alignment);
  }
  fail(checks::line(found->at), nullptr, "access through a null pointer, type %s", found->type->name);
}

void __ubsan_handle_shift_out_of_bounds_abort(checks::Shift* found, uintptr_t, uintptr_t by) {
  fail(checks::line(found->at), nullptr, "shift of type %s by %ld", found->left->name,
       checks::number(found->right, by));
}

void __ubsan_handle_add_overflow_abort(checks::Overflow* found, uintptr_t, uintptr_t) {
  fail(checks::line(found->at), nullptr, "a sum overflows type %s", found->type->name);
}
void __ubsan_handle_sub_overflow_abort(checks::Overflow* found, uintptr_t, uintptr_t) {
  fail(checks::line(found->at), nullptr, "a difference overflows type %s", found->type->name);
}
void __ubsan_handle_mul_overflow_abort(checks::Overflow* found, uintptr_t, uintptr_t) {
  fail(checks::line(found->at), nullptr, "a product overflows type %s", found->type->name);
}
void __ubsan_handle_negate_overflow_abort(checks::Overflow* found, uintptr_t) {
  fail(checks::line(found->at), nullptr, "a negation overflows type %s", found->type->name);
}
void __ubsan_handle_divrem_overflow_abort(checks::Overflow* found, uintptr_t, uintptr_t) {
  fail(checks::line(found->at), nullptr, "division by zero or overflow, type %s", found->type->name);
}
void __ubsan_handle_float_cast_overflow_abort(checks::Cast* found, uintptr_t) {
  fail(checks::line(found->at), nullptr, "a number of type %s does not fit into %s", found->from->name,
       found->to->name);
}
}
