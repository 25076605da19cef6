"""Reading a disassembly."""

from kvcompile.codegen.gpu.sass import count, histogram, main_loop, parse

TEXT = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;   /* 0x00000a0000017a02 */
                                                            /* 0x000fc40000000f00 */
        /*0010*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64] ;
        /*0020*/              @!P0 BRA 0x90 ;
        /*0030*/                   LDGSTS.E [R3], [R4.64] ;
        /*0040*/              @!P1 LDG.E.64 R8, [R6.64] ;
        /*0050*/                   FADD R9, R9, R8 ;
        /*0060*/                   FADD R9, R9, R9 ;
        /*0070*/              @!UPT UIADD3 UR4, UR4, 0x1, URZ ;
        /*0080*/               @P0 BRA 0x30 ;
        /*0090*/                   STG.E [R4.64], R9 ;
        /*00a0*/                   EXIT ;
        /*00b0*/                   STL [R1], R9 ;
        /*00c0*/                   BRA 0x10 ;
        /*00d0*/                   BRA 0xd0;
        /*00e0*/                   NOP;
"""


def test_instructions_and_their_suffixes() -> None:
    found = parse(TEXT)
    assert len(found) == 14
    assert found[4].name == "LDG.E.64"
    assert found[4].base == "LDG"
    assert count(found, "LDL", "STL") == 1


def test_the_main_loop_is_the_innermost_that_copies() -> None:
    body = main_loop(parse(TEXT))
    assert [body[0].address, body[-1].address] == [0x30, 0x80]
    assert histogram(body) == {"FADD": 2, "LDGSTS.E": 1, "LDG.E.64": 1, "UIADD3": 1, "BRA": 1}


def test_without_copies_there_is_no_main_loop() -> None:
    assert main_loop(parse(TEXT.replace("LDGSTS", "LDG"))) == []
