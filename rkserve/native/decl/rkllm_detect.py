# Written by scripts/make_declarations.py. Do not edit.
import _cffi_backend

ffi = _cffi_backend.FFI('rkserve.native.decl.rkllm_detect',
    _version = 0x2601,
    _types = b'\x00\x00\x02\x0D\x00\x00\x00\x0F\x00\x00\x00\x09\x00\x00\x12\x01\x00\x00\x03\x05\x00\x00\x01\x00',
    _globals = (b'\x00\x00\x00\x23rkllm_createDefaultParam',0,),
    _struct_unions = ((b'\x00\x00\x00\x02\x00\x00\x00\x02$Oversized',b'\x00\x00\x04\x11bytes'),),
    _typenames = (b'\x00\x00\x00\x02Oversized',),
)
