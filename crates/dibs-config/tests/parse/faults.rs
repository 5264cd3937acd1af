//! How a fault is told: the place, a hint, an excerpt.

use std::path::Path;

use super::{fault, refused};

#[test]
fn places_and_hints() {
    let refusals = [
        (
            "mark_mask ",
            "mark_msk ",
            "6:1: unknown key \"mark_msk\" in [daemon]; hint: did you mean \"mark_mask\"?",
        ),
        (
            "interface = \"eth0\"",
            "interfaces = \"eth0\"",
            "17:1: unknown key \"interfaces\" in [[path]]; hint: did you mean \"interface\"?",
        ),
        (
            "[[rule]]",
            "[[rules]]",
            "40:3: unknown key \"rules\" in the file; hint: did you mean \"rule\"?",
        ),
        (
            "gid = 100",
            "colour = 3",
            "46:1: unknown key \"colour\" in [[rule]]; hint: known are bump, protocol, all, dport, sport, uid, user, gid, source, destination, interface, dscp, time, match, priority, require, prefer, scheduler",
        ),
        (
            "gid = 100",
            "\"\tgid\" = 100",
            "46:1: unknown key \"\\tgid\" in [[rule]]; hint: did you mean \"gid\"?",
        ),
        (
            "wlan = \"10.0.2.2:5300\"",
            "wlna = \"10.0.2.2:5300\"",
            "33:1: there is no path \"wlna\"; hint: did you mean \"wlan\"?",
        ),
        (
            "wlan = \"10.0.2.2:5300\"",
            "wlan = \"10.0.2.2\"",
            "33:8: wlan has no port; hint: write \"10.0.2.2:5300\"",
        ),
        (
            "\"balanced\"",
            "\"ballanced\"",
            "10:20: scheduler cannot be \"ballanced\"; hint: did you mean \"balanced\"?",
        ),
        (
            "address = \"10.0.2.1\"",
            "role = \"bakcup\"",
            "23:8: role cannot be \"bakcup\"; hint: did you mean \"backup\"?",
        ),
        (
            "address = \"10.0.2.1\"",
            "rate = \"20 MB\"",
            "23:8: rate cannot be \"20 MB\"; hint: write a number with kbit, Mbit or Gbit (a second), such as \"20 Mbit\"",
        ),
        (
            "address = \"10.0.2.1\"",
            "rate = 20",
            "23:8: rate is an integer, but has to be a string",
        ),
        (
            "address = \"10.0.2.1\"",
            "volume = \"1 kB\"",
            "23:10: volume has to be within 1 MB and 1000000 TB",
        ),
        (
            "control_socket   = \"/run/dibs/dibsd.sock\"",
            "state_dir = \"lib\"",
            "4:13: state_dir is not an absolute path; hint: begin it with /",
        ),
        (
            "bump = \"scramble\"",
            "bump = \"scrambel\"",
            "41:8: bump \"scrambel\" is no known bump; hint: did you mean \"scramble\"?",
        ),
        (
            "trusted_share    = 0.05",
            "trusted_share    = 1.5",
            "11:20: trusted_share has to be within 0 and 1",
        ),
        (
            "0x3f000000",
            "0x3f00003f",
            "6:20: mark_mask 0x3f00003f is not one run of bits; hint: such as the default 0x3f000000",
        ),
        (
            "port             = 5300",
            "port = \"5300\"",
            "5:8: port is a string, but has to be a whole number",
        ),
        (
            "trust = \"untrusted\"\n",
            "",
            "20:1: [[path]] lacks \"trust\"; hint: dibsd.toml(5) has an example of each key",
        ),
    ];
    for (piece, replacement, message) in refusals {
        assert_eq!(refused(piece, replacement), message);
    }
}

#[test]
fn excerpt_underlines_the_fault() {
    let invalid = fault("[daemon]\n\tport = 70000 # high\n");
    assert_eq!(
        invalid.excerpt(),
        "2 | \tport = 70000 # high\n  | \t       ^^^^^"
    );
    let invalid = fault("a = 1\u{1b}[2J");
    assert!(
        invalid.excerpt().contains("1 | a = 1\u{fffd}[2J"),
        "{}",
        invalid.excerpt()
    );
    // Columns are characters, not bytes.
    let invalid = fault("[daemon]\nfail = \"é\" \nx = { é = 1 }");
    assert_eq!((invalid.line, invalid.column), (3, 7));
}

#[test]
fn toml_faults_have_a_place() {
    for (text, line) in [
        ("[daemon", 1),
        ("[daemon]\nport = 1\nport = 2\n", 3),
        ("a = 'x", 1),
    ] {
        assert_eq!(fault(text).line, line, "{text}");
    }
}

#[test]
fn the_state_directory_of_a_file_with_a_fault_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("dibsd.toml");
    let found = |text: &[u8]| {
        std::fs::write(&file, text).unwrap();
        dibs_config::state_dir(&file)
    };
    let (usual, own) = (Path::new("/var/lib/dibs"), Path::new("/srv/dibs"));
    assert_eq!(dibs_config::state_dir(&file), usual);
    assert_eq!(
        found(b"[daemon]\nstate_dir = 7\nstate_dir = \"lib\"\n"),
        usual
    );
    assert_eq!(
        found(b"[daemon\n  state_dir = \"/srv/dibs\"  # ours\n[[peer\n"),
        own
    );
    assert_eq!(
        found(b"#state_dir = \"/tmp\"\n\xff\nstate_dir='/srv/dibs'\n"),
        own
    );
}
