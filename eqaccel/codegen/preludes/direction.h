// What a direction reads and writes: 0 forward, 1 backward, 2 double backward, 3 triple backward.
#pragma once

namespace {

constexpr bool has_gradient = EQ_DIRECTION > 0;  // reads gz; writes gx, gy and gw
constexpr bool has_tangents = EQ_DIRECTION > 1;  // reads a, b and c
constexpr bool has_second = EQ_DIRECTION > 2;    // reads p, q, r and g; writes ga, gb and gc
constexpr bool writes_z = EQ_DIRECTION != 1;     // the output, or the gradient with respect to gz

// Rows that x, y and w have each, their own and those of tangents, and gradients that are written of each.
constexpr int tangents = has_second ? 3 : has_tangents ? 2 : 1, gradients = has_second ? 2 : 1;

}  // namespace
