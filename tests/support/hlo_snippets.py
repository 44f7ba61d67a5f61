"""Pieces of what the TPU compiler wrote for small programs, and a module made of them."""

# ruff: noqa: E501

# Attention scores of a block over a tile of its context, as compiled for v5p: the context's keys
# are sliced inside, so that 256 of the 2064 rows are read.
SCORES = """
%fused_slice (param_0.1: bf16[1,8,2064,128], param_1.1: s32[]) -> bf16[8,256,128] {
  %param_0.1 = bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %constant.1 = s32[]{:T(128)} constant(0)
  %param_1.1 = s32[]{:T(128)S(6)} parameter(1)
  %dynamic_slice.1 = bf16[1,8,256,128]{3,2,1,0:T(8,128)(2,1)} dynamic-slice(%param_0.1, %constant.1, %constant.1, %param_1.1, %constant.1), dynamic_slice_sizes={1,8,256,128}
  ROOT %bitcast.1 = bf16[8,256,128]{2,1,0:T(8,128)(2,1)} bitcast(%dynamic_slice.1)
}

%scores (param_0.2: bf16[1,8,2064,128], param_1.2: s32[], param_2.2: bf16[8,64,128]) -> f32[8,64,256] {
  %param_2.2 = bf16[8,64,128]{2,1,0:T(8,128)(2,1)} parameter(2)
  %param_0.2 = bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1.2 = s32[]{:T(128)S(6)} parameter(1)
  %fusion.2 = bf16[8,256,128]{2,1,0:T(8,128)(2,1)} fusion(%param_0.2, %param_1.2), kind=kLoop, calls=%fused_slice
  ROOT %convolution.2 = f32[8,64,256]{2,1,0:T(8,128)} convolution(%param_2.2, %fusion.2), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf, metadata={op_name="jit(generate)/while/body/target/attention/while/body/kbrh,kbsh->kbrs/dot_general" stack_frame_id=500}
}
"""

# A projection by heads, which the compiler writes as a convolution over them.
HEADS = """
%heads (param_0.3: bf16[2560,32,128], param_1.3: bf16[16,2560]) -> bf16[16,32,128] {
  %param_0.3 = bf16[32,128,2560]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1.3 = bf16[16,2560,1]{1,0,2:T(8,128)(2,1)} parameter(1)
  ROOT %convolution.3 = bf16[16,32,128]{2,0,1:T(8,128)(2,1)} convolution(%param_1.3, %param_0.3), window={size=32 pad=31_31 rhs_reversal=1}, dim_labels=bf0_0oi->b0f
}
"""

MODULE = (
    """HloModule jit_generate, is_scheduled=true, entry_computation_layout={(bf16[1]{0})->bf16[1]{0}}
"""
    + SCORES
    + HEADS
    + """
%greedy (greedy.1: (f32[8])) -> f32[8] {
  %greedy.1 = (f32[8]{0:T(256)}) parameter(0)
  ROOT %greedy.2 = f32[8]{0:T(256)} get-tuple-element(%greedy.1), index=0
}

%draw (draw.1: (f32[8])) -> f32[8] {
  %draw.1 = (f32[8]{0:T(256)}) parameter(0)
  %draw.2 = f32[8]{0:T(256)} get-tuple-element(%draw.1), index=0
  ROOT %draw.3 = f32[8]{0:T(256)} negate(%draw.2), metadata={op_name="jit(generate)/while/body/target/sample/if_sampled/neg"}, backend_config={"window_config":{"estimated_cycles":"9000"}}
}

%inner_condition (inner.0: (s32[], bf16[1,8,2064,128])) -> pred[] {
  %inner.0 = (s32[]{:T(128)}, bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %inner.yes = pred[]{:T(512)} constant(true)
}

%inner_body (inner.1: (s32[], bf16[1,8,2064,128])) -> (s32[], bf16[1,8,2064,128]) {
  %inner.1 = (s32[]{:T(128)}, bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)}) parameter(0)
  %inner.2 = s32[]{:T(128)S(6)} get-tuple-element(%inner.1), index=0
  %inner.3 = bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%inner.1), index=1
  %inner.4 = bf16[8,64,128]{2,1,0:T(8,128)(2,1)S(1)} broadcast(%inner.2), dimensions={}
  %fusion.7 = f32[8,64,256]{2,1,0:T(8,128)S(1)} fusion(%inner.3, %inner.2, %inner.4), kind=kOutput, calls=%scores, metadata={op_name="jit(generate)/while/body/target/attention/while/body/kbrh,kbsh->kbrs/dot_general"}, backend_config={"window_config":{"estimated_cycles":"7561"}}
  ROOT %inner.5 = (s32[]{:T(128)}, bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)}) tuple(%inner.2, %inner.3)
}

%body (body.1: (s32[], bf16[1,8,2064,128], bf16[2560,9728], f32[8])) -> (s32[], bf16[1,8,2064,128], bf16[2560,9728], f32[8]) {
  %body.1 = (s32[]{:T(128)}, bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)}, bf16[2560,9728]{1,0:T(8,128)(2,1)}, /*index=3*/f32[8]{0:T(256)}) parameter(0)
  %body.2 = s32[]{:T(128)} get-tuple-element(%body.1), index=0
  %body.3 = bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)} get-tuple-element(%body.1), index=1
  %body.4 = bf16[2560,9728]{1,0:T(8,128)(2,1)} get-tuple-element(%body.1), index=2
  %body.5 = f32[8]{0:T(256)} get-tuple-element(%body.1), index=3
  %copy-start.1 = (bf16[2560,9728]{1,0:T(8,128)(2,1)S(1)}, bf16[2560,9728]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%body.4)
  %body.6 = (s32[]{:T(128)}, bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)}) tuple(%body.2, %body.3)
  %while.1 = (s32[]{:T(128)}, bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)}) while(%body.6), condition=%inner_condition, body=%inner_body, metadata={op_name="jit(generate)/while/body/target/attention/while"}
  %copy-done.1 = bf16[2560,9728]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
  %fusion.8 = bf16[16,9728]{1,0:T(8,128)(2,1)} custom-call(%copy-done.1), custom_call_target="tpu_custom_call", metadata={op_name="jit(generate)/while/body/target/mlp/dot_general"}
  %copy.9 = bf16[2560,9728]{0,1:T(8,128)(2,1)} copy(%body.4), backend_config={"window_config":{"estimated_cycles":"63588"}}
  %all-reduce.1 = bf16[1,16,2560]{2,1,0:T(8,128)(2,1)} all-reduce(%fusion.8), replica_groups={{0,1,2,3}}, to_apply=%greedy, metadata={op_name="jit(generate)/while/body/target/mlp/dot_general"}, backend_config={"window_config":{"estimated_cycles":"500"}}
  %pred.1 = pred[]{:T(512)} constant(false)
  %args.1 = (f32[8]{0:T(256)}) tuple(%body.5)
  %conditional.1 = f32[8]{0:T(256)} conditional(%pred.1, %args.1, %args.1), branch_computations={%greedy, %draw}, metadata={op_name="jit(generate)/while/body/target/sample/if_sampled/cond"}
  ROOT %body.9 = (s32[]{:T(128)}, bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)}, bf16[2560,9728]{1,0:T(8,128)(2,1)}, /*index=3*/f32[8]{0:T(256)}) tuple(%body.2, %body.3, %body.4, %conditional.1)
}

ENTRY %main (p0: s32[], p1: bf16[1,8,2064,128], p2: bf16[2560,9728], p3: f32[8]) -> f32[8] {
  %p0 = s32[]{:T(128)} parameter(0)
  %p1 = bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="state.keys"}
  %p2 = bf16[2560,9728]{1,0:T(8,128)(2,1)} parameter(2)
  %p3 = f32[8]{0:T(256)} parameter(3)
  %copy.1 = bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)} copy(%p1), backend_config={"window_config":{"estimated_cycles":"17032"}}
  %tuple.1 = (s32[]{:T(128)}, bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)}, bf16[2560,9728]{1,0:T(8,128)(2,1)}, f32[8]{0:T(256)}) tuple(%p0, %copy.1, %p2, %p3)
  %while.2 = (s32[]{:T(128)}, bf16[1,8,2064,128]{3,2,1,0:T(8,128)(2,1)}, bf16[2560,9728]{1,0:T(8,128)(2,1)}, /*index=3*/f32[8]{0:T(256)}) while(%tuple.1), condition=%inner_condition, body=%body, metadata={op_name="jit(generate)/while"}, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %result = f32[8]{0:T(256)} get-tuple-element(%while.2), index=3
}
"""
)
