/* A processor with three frequencies, and a zone that warms to 80 °C and cools to 50 °C, by 2 °C whenever it is read. */
DefinitionBlock ("", "SSDT", 2, "MOESC", "HEAT", 1)
{
    External (\_SB.CPUS.C000, DeviceObj)

    Scope (\_SB.CPUS.C000)
    {
        Name (_PCT, Package ()
        {
            ResourceTemplate () { Register (SystemIO, 8, 0, 0xE0) },
            ResourceTemplate () { Register (SystemIO, 8, 0, 0xE0) }
        })
        Name (_PSS, Package ()
        {
            Package () { 2000, 35000, 10, 10, 0x02, 0x02 },
            Package () { 1500, 25000, 10, 10, 0x01, 0x01 },
            Package () { 1000, 15000, 10, 10, 0x00, 0x00 }
        })
        Method (_PPC, 0) { Return (0) }
    }

    Scope (\_TZ)
    {
        ThermalZone (HEAT)
        {
            Name (WARM, 3232) /* tenths of a kelvin: 50 °C */
            Name (STEP, 20)
            Method (_TMP, 0, Serialized)
            {
                If (LGreaterEqual (WARM, 3532)) { Store (0, STEP) }
                If (LLessEqual (WARM, 3232)) { Store (20, STEP) }
                If (STEP) { Add (WARM, 20, WARM) } Else { Subtract (WARM, 20, WARM) }
                Return (WARM)
            }
            Name (_PSV, 3332) /* 60 °C */
            Name (_CRT, 3932)
            Name (_PSL, Package () { \_SB.CPUS.C000 })
            Name (_TC1, 4)
            Name (_TC2, 3)
            Name (_TSP, 10)
            Name (_TZP, 10)
        }
    }
}
