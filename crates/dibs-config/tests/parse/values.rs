//! What each key takes.

use dibs_settings::Scheduler;

use super::{KEY, contract, good, refused};

#[test]
#[expect(clippy::too_many_lines, reason = "a table of values")]
fn each_value_is_checked() {
    for (piece, replacement, part) in [
        // daemon
        ("port             = 5300", "port = 0", "within 1 and 65535"),
        (
            "port             = 5300",
            "port = 65536",
            "within 1 and 65535",
        ),
        ("port             = 5300", "port = -1", "within 1 and 65535"),
        (
            "port             = 5300",
            "port = 99999999999999999999",
            "within 1 and 65535",
        ),
        ("0x3f000000", "0x1f000000", "has 5 bits"),
        ("table_base       = 5200", "table_base = 253", "within 256"),
        ("\"closed\"", "\"shut\"", "known are closed, open"),
        (
            "port             = 5300",
            "metrics = \"0.0.0.0:9477\"",
            "is not an address of one host",
        ),
        (
            "port             = 5300",
            "metrics = \"10.0.1.1:9477\"",
            "not a loopback address",
        ),
        (
            "port             = 5300",
            "metrics = \"127.0.0.1\"",
            "has no port",
        ),
        (
            "port             = 5300",
            "metrics = 9477",
            "has to be a string",
        ),
        (
            "integrity        = \"on\"",
            "integrity = true",
            "is a boolean",
        ),
        (
            "\"hold\"",
            "\"plain\"",
            "on_trusted_down cannot be \"plain\"",
        ),
        (
            "trusted_share    = 0.05",
            "trusted_share = nan",
            "within 0 and 1",
        ),
        (
            "trusted_share    = 0.05",
            "trusted_share = \"much\"",
            "has to be a number",
        ),
        (
            "default_bump     = \"scramble\"",
            "default_bump = \"plain\"",
            "no known bump",
        ),
        ("\"/etc/dibs/private.key\"", "\"\"", "is empty"),
        (
            "\"/run/dibs/dibsd.sock\"",
            &format!("\"/{}\"", "x".repeat(107)),
            "108 bytes long",
        ),
        (
            "\"/run/dibs/dibsd.sock\"",
            "\"/run/dibs/dibsd.state\"",
            "ends in .state, as the file beside it",
        ),
        (
            "\"/run/dibs/dibsd.sock\"",
            "\"dibsd.sock\"",
            "is not an absolute path",
        ),
        // path
        ("name = \"wlan\"", "name = \"eth\"", "\"eth\" is taken"),
        ("name = \"wlan\"", "name = \"w lan\"", "is not a name"),
        ("name = \"wlan\"\n", "", "[[path]] lacks \"name\""),
        ("\"wlan0\"", "\"wlan0\\n-j ACCEPT\"", "names no interface"),
        ("\"10.0.2.1\"", "\"10.0.2.1/24\"", "without prefix length"),
        (
            "\"10.0.2.1\"",
            "\"0.0.0.0\"",
            "not the address of one interface",
        ),
        ("\"untrusted\"", "\"semi\"", "trust cannot be \"semi\""),
        (
            "interface = \"wlan0\"\n",
            "",
            "add the interface of the path",
        ),
        (
            "interface = \"wlan0\"\naddress = \"10.0.2.1\"\n",
            "",
            "lacks \"interface\"",
        ),
        ("\"wlan0\"", "\"eth0\"", "is also that of path \"eth\""),
        (
            "integrity        = \"on\"",
            "handshake = \"none\"",
            "handshake cannot be \"none\"",
        ),
        // peer
        (KEY, "c2hvcnQ=", "base64 of 32 bytes"),
        (
            KEY,
            "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
            "not a usable public key",
        ),
        ("[\"10.0.1.2/32\"]", "[]", "addresses is empty"),
        ("[\"10.0.1.2/32\"]", "\"10.0.1.2/32\"", "has to be a list"),
        (
            "[\"10.0.1.2/32\"]",
            "[\"10.0.1.2/24\"]",
            "10.0.1.0/24 or 10.0.1.2/32",
        ),
        (
            "[\"10.0.1.2/32\"]",
            "[\"10.0.1.2\", \"10.0.1.2/32\"]",
            "twice",
        ),
        ("[\"10.0.1.2/32\"]", "[\"127.0.0.1/32\"]", "loopback"),
        (
            "addresses = [\"10.0.1.2/32\"]\n",
            "",
            "[[peer]] lacks \"addresses\"",
        ),
        (
            "\"10.0.2.2:5300\"",
            "\"[fd00::2]:5300\"",
            "one is IPv4, the other IPv6",
        ),
        (
            "\"10.0.2.2:5300\"",
            "\"ser ver:5300\"",
            "not an address with port",
        ),
        ("\"10.0.2.2:5300\"", "\"server\"", "\"server\" has no port"),
        // bump
        (
            "name = \"vpn\"",
            "name = \"seal\"",
            "kind cannot be \"device\"",
        ),
        (
            "name = \"vpn\"",
            "name = \"scramble\"",
            "\"scramble\" is taken",
        ),
        ("name = \"vpn\"", "name = \"plain\"", "\"plain\" is taken"),
        (
            "kind = \"device\"",
            "kind = \"seal\"",
            "kind cannot be \"seal\"",
        ),
        ("device = \"tun9\"\n", "", "[[bump]] lacks \"device\""),
        ("\"tun9\"", "\"../tun9\"", "is not the name of an interface"),
        ("\"tun9\"", "\"dibs1\"", "a name of dibsd's own devices"),
        ("\"tun9\"", "\"lo\"", "is not a TUN or TAP device"),
        (
            "\"tun9\"",
            "\"wlan0\"",
            "is also the interface of path \"wlan\"",
        ),
        (
            "device = \"tun9\"\n",
            "device = \"tun9\"\n[[bump]]\nname = \"b\"\nkind = \"device\"\ndevice = \"tun9\"\n",
            "is also that of bump \"vpn\"",
        ),
        // rule
        ("bump = \"scramble\"\n", "", "[[rule]] lacks \"bump\""),
        ("\"tcp\"", "\"udp\"", "known are tcp"),
        ("dport = 80", "dport = 0", "within 1 and 65535"),
        ("dport = 80", "dport = \"90-80\"", "not a port or a range"),
        ("dport = 80", "dport = []", "dport is empty"),
        ("dport = 80", "dport = [80, true]", "is a boolean"),
        ("uid = 1000", "uid = -1", "within 0 and 4294967294"),
        ("gid = 100", "user = \"www-data\"", "both uid and user"),
        ("uid = 1000", "user = \"a b\"", "is not the name of a user"),
        (
            "\"10.0.1.0/24\"",
            "\"10.0.1.0/33\"",
            "not an address with prefix length",
        ),
        ("\"08:00-18:00\"", "\"8-18\"", "write \"08:00-18:00\""),
        ("gid = 100", "dscp = 64", "within 0 and 63"),
        ("gid = 100", "dscp = \"AF9\"", "\"AF9\" is no DSCP"),
        (
            "gid = 100",
            "interface = \"a b\"",
            "is not the name of an interface",
        ),
        (
            "gid = 100",
            "source = \"10.0.1/24\"",
            "not an address with prefix length",
        ),
        ("gid = 100", "priority = 1.5", "a whole number"),
        (
            "gid = 100",
            "priority = 1000001",
            "within -1000000 and 1000000",
        ),
        (
            "\"-m dscp --dscp-class EF\"",
            "\"-j ACCEPT\"",
            "may not use \"-j\"",
        ),
        (
            "\"-m dscp --dscp-class EF\"",
            "\"-m dscp\\nCOMMIT\"",
            "control character",
        ),
        // shapes
        ("[daemon]", "[[daemon]]", "has to be a table, [daemon]"),
        ("[[bump]]", "[bump]", "written as [[bump]]"),
        ("port             = 5300", "port =", "dibs.toml"),
    ] {
        let message = format!("dibs.toml:{}", refused(piece, replacement));
        assert!(message.contains(part), "{replacement}: {message}");
    }
}

#[test]
fn each_scheduler_is_known() {
    for scheduler in Scheduler::ALL {
        let text = contract().replace("\"balanced\"", &format!("\"{scheduler}\""));
        assert_eq!(good(&text).daemon.scheduler, scheduler);
    }
}
