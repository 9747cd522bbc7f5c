// What a direction reads and writes: 0 forward, 1 backward, 2 double backward.
#pragma once

namespace {

constexpr bool has_gradient = EQ_DIRECTION > 0;  // reads gz; writes gx, gy and gw
constexpr bool has_tangents = EQ_DIRECTION > 1;  // reads a, b and c
constexpr bool writes_z = EQ_DIRECTION != 1;     // the output, or the gradient with respect to gz

}  // namespace
