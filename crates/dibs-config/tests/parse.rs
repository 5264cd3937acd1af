//! What the file may say, what it may not, and how it is told.

use dibs_config::{
    Config, Error, Fail, Integrity, Invalid, Level, OnTrustedDown, PathUsage, Prefer, Trust, load,
    parse,
};
use dibs_core::bump::{KINDS, Method, Padding};
use dibs_core::node::{Opening, Role, Scheduler};

const KEY: &str = "hSDwCYkwp1R0i33ctD73Wg2/Og0mOBr066SpjqqbTmo=";
const KEY2: &str = "3p7bfXt9wbTTW2HC7OQ1Nz+DQ8hbeGdNrfx+FG+IK08=";

/// The file of the contract.
fn contract() -> String {
    format!(
        r#"
[daemon]
private_key_file = "/etc/dibs/private.key"
control_socket   = "/run/dibs/dibsd.sock"
port             = 5300
mark_mask        = 0x3f000000
table_base       = 5200
fail             = "closed"
integrity        = "on"
scheduler        = "balanced"
trusted_share    = 0.05
on_trusted_down  = "hold"
default_bump     = "scramble"

[[path]]
name = "eth"
interface = "eth0"
trust = "trusted"

[[path]]
name = "wlan"
interface = "wlan0"
address = "10.0.2.1"
trust = "untrusted"

[[peer]]
name = "server"
public_key = "{KEY}"
preshared_key_file = "/etc/dibs/psk"
addresses = ["10.0.1.2/32"]
[peer.endpoints]
eth  = "10.0.1.2:5300"
wlan = "10.0.2.2:5300"

[[bump]]
name = "vpn"
kind = "device"
device = "tun9"

[[rule]]
bump = "scramble"
protocol = "tcp"
dport = 80
sport = ["1024-65535", 7]
uid = 1000
gid = 100
destination = "10.0.1.0/24"
time = "08:00-18:00"
match = "-m dscp --dscp-class EF"
"#
    )
}

fn good(text: &str) -> Config {
    parse("dibs.toml", text).unwrap_or_else(|error| panic!("{error}"))
}

#[track_caller]
fn fault(text: &str) -> Box<Invalid> {
    match parse("dibs.toml", text) {
        Err(Error::Invalid(invalid)) => invalid,
        other => panic!("was to be refused: {other:?}\n{text}"),
    }
}

/// The contract's file with one piece replaced is refused; returns how, without the file's name.
#[track_caller]
fn refused(piece: &str, replacement: &str) -> String {
    let text = contract();
    assert!(text.contains(piece), "{piece}");
    let message = fault(&text.replacen(piece, replacement, 1)).to_string();
    assert_eq!(message.lines().count(), 1, "one sentence: {message}");
    message.strip_prefix("dibs.toml:").unwrap().to_owned()
}

#[test]
fn what_would_let_out_what_a_rule_requires_is_refused() {
    let with = |rule: &str| format!("{}\n[[rule]]\nbump = \"scramble\"\n{rule}\n", contract());
    let required = with("user = \"backup\"\nrequire = true");
    let line = required.lines().count();
    let levels = good(&required)
        .rules
        .iter()
        .map(|rule| rule.level)
        .collect::<Vec<_>>();
    assert_eq!(levels, [Level::Usual, Level::Require]);
    for (key, kept, open) in [
        ("fail             ", "closed", "open"),
        ("on_trusted_down  ", "hold", "untrusted"),
        ("integrity        ", "on", "off"),
    ] {
        let [kept_line, open_line] = [kept, open].map(|value| format!("{key}= \"{value}\""));
        assert!(required.contains(&kept_line), "{kept_line}");
        let text = required.replacen(&kept_line, &open_line, 1);
        let key = key.trim();
        assert_eq!(
            fault(&text).to_string(),
            format!(
                "dibs.toml:{line}:11: require cannot be kept with {key} = \"{open}\"; hint: set {key} \
                 = \"{kept}\" in [daemon], or leave require out"
            )
        );
        good(&text.replacen("require = true", "require = false", 1));
    }
    for unseen in [
        "gid = 7",
        "interface = \"eth0\"",
        "dscp = 8",
        "match = \"-m tos --tos 8\"",
    ] {
        let said = fault(&with(&format!("{unseen}\nrequire = true"))).to_string();
        let key = unseen.split(' ').next().unwrap();
        assert!(
            said.contains(&format!(":1: a rule with {key} cannot require")),
            "{said}"
        );
        good(&with(&format!("{unseen}\nprefer = true")));
    }
    let said = fault(&with("prefer = true\nrequire = true")).to_string();
    assert!(
        said.contains(":1: a rule requires its bump or prefers it, not both"),
        "{said}"
    );
    let said = fault(&with("require = \"yes\"")).to_string();
    assert!(said.contains("has to be true or false"), "{said}");
}

#[test]
fn rules_that_contradict_each_other_are_refused_at_the_later_one() {
    let with = |rules: &[&str]| {
        let rules: String = rules
            .iter()
            .map(|rule| format!("\n[[rule]]\n{rule}\n"))
            .collect();
        contract() + &rules
    };
    let (one, other) = (
        "bump = \"scramble\"\ndport = [7, 9]",
        "bump = \"seal\"\ndport = [9, 7]",
    );
    let text = with(&[one, other]);
    let line = text.lines().count() - 1;
    assert_eq!(
        fault(&text).to_string(),
        format!(
            "dibs.toml:{line}:8: rule 3 selects the same connections as rule 2, which puts them on \
             \"scramble\"; hint: give them one bump, one level and one scheduler, or let them select apart"
        )
    );
    let level = with(&[one, &format!("{one}\nprefer = true")]);
    assert!(fault(&level).message.starts_with("rule 3 selects the same"));
    let required = |rule: &str| format!("{rule}\nrequire = true");
    let wide = "bump = \"seal\"\ndestination = \"10.0.1.2/32\"";
    let both = with(&[&required(one), &required(wide)]);
    let message = fault(&both).message;
    assert!(
        message
            .starts_with("rule 3 requires another bump of some of the same connections as rule 2"),
        "{message}"
    );
    let scheduled = |name: &str| format!("{one}\nscheduler = \"{name}\"");
    let message = fault(&with(&[&scheduled("blest"), &scheduled("redundant")])).message;
    assert!(
        message.starts_with("rule 3 has another scheduler for the same connections as rule 2"),
        "{message}"
    );
    good(&with(&[one, &scheduled("redundant")]));
    // Which one counts is a matter of order where only one of them, or neither, insists.
    good(&with(&[&required(one), wide]));
    good(&with(&[one, "bump = \"seal\"\ndport = 9"]));
    good(&with(&[one, &format!("{other}\ntime = \"08:00-09:00\"")]));
}

#[test]
fn the_contract_is_read() {
    let config = good(&contract());
    let daemon = &config.daemon;
    assert_eq!(
        daemon.private_key_file.to_str(),
        Some("/etc/dibs/private.key")
    );
    assert_eq!(daemon.control_socket.to_str(), Some("/run/dibs/dibsd.sock"));
    assert_eq!(
        (daemon.port, daemon.mark_mask, daemon.table_base),
        (5300, 0x3f00_0000, 5200)
    );
    assert_eq!(
        (daemon.fail, daemon.integrity),
        (Fail::Closed, Integrity::On)
    );
    assert_eq!(
        (daemon.scheduler, daemon.trusted_share),
        (Scheduler::Balanced, 0.05)
    );
    assert_eq!(daemon.on_trusted_down, OnTrustedDown::Hold);
    assert_eq!(daemon.default_bump.as_deref(), Some("scramble"));

    let [eth, wlan] = &config.paths[..] else {
        panic!("{:?}", config.paths)
    };
    assert_eq!(
        (eth.name.as_str(), eth.trust, eth.address),
        ("eth", Trust::Trusted, None)
    );
    assert_eq!(wlan.interface.as_deref(), Some("wlan0"));
    assert_eq!(wlan.address, Some("10.0.2.1".parse().unwrap()));

    let [peer] = &config.peers[..] else {
        panic!("{:?}", config.peers)
    };
    assert_eq!(
        (peer.name.as_str(), peer.public_key.to_string().as_str()),
        ("server", KEY)
    );
    assert_eq!(peer.addresses, ["10.0.1.2/32".parse().unwrap()]);
    let endpoint = |path: &str, at: &str| (path.to_owned(), at.parse().unwrap());
    assert_eq!(
        peer.endpoints,
        [
            endpoint("eth", "10.0.1.2:5300"),
            endpoint("wlan", "10.0.2.2:5300")
        ]
    );

    let bumps: Vec<_> = config.bumps.iter().map(|bump| bump.name.as_str()).collect();
    assert_eq!(bumps[..3], ["scramble", "share", "seal"]);
    assert_eq!(bumps[KINDS.len()..], ["vpn"]);
    assert_eq!(config.bump("vpn").unwrap().device(), Some("tun9"));

    let [rule] = &config.rules[..] else {
        panic!("{:?}", config.rules)
    };
    let selection = &rule.selection;
    let ports = |ranges: &[dibs_config::PortRange]| -> Vec<String> {
        ranges.iter().map(ToString::to_string).collect()
    };
    assert_eq!(
        (ports(&selection.dport), ports(&selection.sport)),
        (
            vec!["80".to_owned()],
            vec!["1024-65535".to_owned(), "7".to_owned()]
        )
    );
    assert_eq!(
        (selection.uid, selection.gid, &selection.user),
        (Some(1000), Some(100), &None)
    );
    assert_eq!(selection.destination, ["10.0.1.0/24".parse().unwrap()]);
    assert_eq!(selection.time.unwrap().to_string(), "08:00-18:00");
    assert_eq!(selection.match_expr.as_ref().unwrap().args()[1], "dscp");
    assert_eq!((rule.priority, rule.level), (0, Level::Usual));
}

#[test]
fn all_but_a_trusted_path_may_be_left_out() {
    let config = good("[[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n");
    let shown = good(&contract()).daemon;
    assert_eq!(
        config.daemon,
        dibs_config::Daemon {
            default_bump: None,
            ..shown
        }
    );
    assert!(config.peers.is_empty() && config.rules.is_empty() && config.warnings().is_empty());
}

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
            "46:1: unknown key \"colour\" in [[rule]]; hint: known are bump, protocol, dport, sport, uid, user, gid, source, destination, interface, dscp, time, match, priority, require, prefer, scheduler",
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
            "4:13: state_dir is not an absolute path",
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
            "20:1: [[path]] lacks \"trust\"",
        ),
    ];
    for (piece, replacement, message) in refusals {
        assert_eq!(refused(piece, replacement), message);
    }
}

#[test]
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
            "is not the address of one host",
        ),
        (
            "port             = 5300",
            "metrics = \"10.0.1.1:9477\"",
            "no loopback address",
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
        (
            "\"wlan0\"",
            "\"wlan0\\n-j ACCEPT\"",
            "is not the name of an interface",
        ),
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
            "name the path's interface too",
        ),
        (
            "interface = \"wlan0\"\naddress = \"10.0.2.1\"\n",
            "",
            "lacks \"interface\"",
        ),
        ("\"wlan0\"", "\"eth0\"", "is that of path \"eth\" too"),
        (
            "trust = \"trusted\"",
            "trust = \"untrusted\"",
            "no path is trusted",
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
            "\"server:5300\"",
            "not an address with port",
        ),
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
            "is the interface of path \"wlan\" too",
        ),
        (
            "device = \"tun9\"\n",
            "device = \"tun9\"\n[[bump]]\nname = \"b\"\nkind = \"device\"\ndevice = \"tun9\"\n",
            "is that of bump \"vpn\" too",
        ),
        // rule
        ("bump = \"scramble\"\n", "", "[[rule]] lacks \"bump\""),
        ("\"tcp\"", "\"udp\"", "known are tcp"),
        ("dport = 80", "dport = 0", "within 1 and 65535"),
        ("dport = 80", "dport = \"90-80\"", "not a port or a range"),
        ("dport = 80", "dport = []", "dport is empty"),
        ("dport = 80", "dport = [80, true]", "is a boolean"),
        ("uid = 1000", "uid = -1", "within 0 and 4294967294"),
        ("gid = 100", "user = \"www-data\"", "uid or user, not both"),
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
fn peers_share_neither_key_nor_name_nor_prefix() {
    let second = |name: &str, key: &str, address: &str| {
        let peer = format!(
            "\n[[peer]]\nname = \"{name}\"\npublic_key = \"{key}\"\naddresses = [\"{address}\"]\n"
        );
        contract() + &peer
    };
    // A prefix within another peer's is WireGuard's longest match, and stands.
    assert_eq!(good(&second("other", KEY2, "10.0.1.0/24")).peers.len(), 2);
    for (text, part) in [
        (second("server", KEY2, "10.9.0.0/16"), "\"server\" is taken"),
        (
            second("other", KEY, "10.9.0.0/16"),
            "is that of peer \"server\" too",
        ),
        (
            second("other", KEY2, "10.0.1.2"),
            "10.0.1.2/32, which is peer \"server\"'s",
        ),
    ] {
        let message = fault(&text).to_string();
        assert!(message.contains(part), "{message}");
    }
}

/// What a peer may open, and what is no such thing.
#[test]
fn peers_open_what_the_file_names() {
    let addresses = "addresses = [\"10.0.1.2/32\"]";
    let accept = |value: &str| {
        let text = contract().replacen(addresses, &format!("{addresses}\naccept = {value}"), 1);
        let openings = good(&text).peers[0].accept.clone();
        openings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(good(&contract()).peers[0].accept, [Opening::PATHS]);
    assert_eq!(accept("[]"), [""; 0]);
    assert_eq!(accept("22"), ["22"]);
    assert_eq!(accept("\"any\""), ["any"]);
    let all = "[\"paths\", 80, \"8000-8010\", \"172.17.0.1:53\", \"[fd00::1]:1-9\"]";
    let expected = ["paths", "80", "8000-8010", "172.17.0.1:53", "[fd00::1]:1-9"];
    assert_eq!(accept(all), expected);

    for bad in [
        "22x",
        "",
        "0",
        "10-9",
        "10.0.1.1",
        "10.0.1.1:",
        "10.0.1:22",
        "fd00::1:22",
        "[fd00::1]",
        "[10.0.1.1]:22",
        "127.0.0.1:22",
        "[::1]:22",
        "0.0.0.0:22",
        "224.0.0.1:5",
        "all",
        "eth:22",
    ] {
        let said = refused(addresses, &format!("{addresses}\naccept = [\"{bad}\"]"));
        assert!(said.starts_with("31:"), "{bad}: {said}");
        assert!(
            said.contains("nothing that a peer may open"),
            "{bad}: {said}"
        );
    }
    for bad in ["0", "[65536]", "true", "[[22]]"] {
        let said = refused(addresses, &format!("{addresses}\naccept = {bad}"));
        assert!(
            said.starts_with("31:") && said.contains("accept"),
            "{bad}: {said}"
        );
    }
    let said = refused(addresses, &format!("{addresses}\naccepts = [22]"));
    assert!(said.contains("accept"), "{said}");
}

#[test]
fn address_only_paths_stand_where_trust_is_equal() {
    let path = |name: &str, address: &str, trust: &str| {
        format!("[[path]]\nname = \"{name}\"\naddress = \"{address}\"\ntrust = \"{trust}\"\n")
    };
    let two = |trust| path("a", "10.0.1.1", "trusted") + &path("b", "10.0.2.1", trust);
    assert_eq!(good(&two("trusted")).paths[1].interface, None);
    assert_eq!(fault(&two("untrusted")).line, 3);
    let twice = path("a", "10.0.1.1", "trusted") + &path("b", "10.0.1.1", "trusted");
    assert!(fault(&twice).message.contains("is that of path \"a\" too"));
    let neither = "[[path]]\nname = \"a\"\ntrust = \"trusted\"\n";
    assert!(fault(neither).message.contains("lacks \"interface\""));
}

#[test]
fn devices_end_where_marks_end() {
    let device = |i| format!("[[bump]]\nname = \"b{i}\"\nkind = \"device\"\ndevice = \"tun{i}\"\n");
    let devices = |n: u32| contract() + &(0..n).map(device).collect::<String>();
    assert_eq!(good(&devices(6)).bumps.len(), KINDS.len() + 7);
    assert!(fault(&devices(7)).message.contains("more than the 7"));
}

#[test]
fn sharing_and_sealing_have_settings() {
    let with = |bump: &str| contract() + "[[bump]]\n" + bump;
    let of = |text: &str, name: &str| {
        let config = good(text);
        let bump = config.bump(name).unwrap();
        bump.built_in().unwrap().clone()
    };
    assert_eq!(of(&contract(), "share").shares(), Some((2, 2)), "all paths");
    let third = "[[path]]\nname = \"lte\"\ninterface = \"lte0\"\ntrust = \"untrusted\"\n";
    let two_of_three = with("name = \"share\"\nkind = \"share\"\nneeded = 2\n") + third;
    assert_eq!(of(&two_of_three, "share").shares(), Some((2, 3)));
    let padded = with("name = \"seal\"\nkind = \"seal\"\npadding = true\n");
    for (text, padding) in [(padded, Padding::Buckets), (contract(), Padding::None)] {
        let method = of(&text, "seal").method;
        assert!(
            matches!(method, Method::Seal(is) if is == padding),
            "{method:?}"
        );
    }
    for (bump, says) in [
        (
            "name = \"share\"\nkind = \"share\"\nshares = 3\n",
            "the file has 2 paths",
        ),
        (
            "name = \"share\"\nkind = \"share\"\nneeded = 3\n",
            "is 3, of 2 shares",
        ),
        (
            "name = \"share\"\nkind = \"share\"\nneeded = 1\n",
            "is 1, of 2 shares",
        ),
        (
            "name = \"share\"\nkind = \"share\"\npadding = true\n",
            "no key of kind",
        ),
        (
            "name = \"seal\"\nkind = \"seal\"\ndevice = \"tun0\"\n",
            "no key of kind",
        ),
        (
            "name = \"b\"\nkind = \"device\"\ndevice = \"tun0\"\nshares = 2\n",
            "no key of kind",
        ),
    ] {
        let message = fault(&with(bump)).to_string();
        assert!(message.contains(says), "{bump}: {message}");
    }
    let alone = contract().replace(
        "default_bump     = \"scramble\"",
        "default_bump = \"share\"",
    );
    let from = alone
        .find("[[path]]\nname = \"wlan\"")
        .expect("the second path");
    let to = alone[from..].find("[[peer]]").expect("a peer") + from;
    let alone = alone
        .replace(&alone[from..to], "")
        .replace("wlan = \"10.0.2.2:5300\"\n", "");
    let refused = good(&alone).check_carried().unwrap_err().to_string();
    assert!(refused.contains("needs 2 paths at least"), "{refused}");
    let twice = "name = \"seal\"\nkind = \"seal\"\n";
    let twice = with(twice) + "[[bump]]\n" + twice;
    assert!(fault(&twice).message.contains("listed twice"));
}

#[test]
fn each_kind_of_the_core_is_known_by_its_name() {
    let kept = "default_bump     = \"scramble\"";
    for kind in KINDS {
        let name = kind.name;
        let used = contract().replace(kept, &format!("default_bump = \"{name}\""));
        let used = used + &format!("[[rule]]\nbump = \"{name}\"\ndport = 81\n");
        let config = good(&used);
        config.check_carried().unwrap();
        let bump = config.bump(name).unwrap().built_in().unwrap();
        assert_eq!(bump.number, kind.number);
        let warnings = config.warnings();
        let told = kind
            .warning
            .is_none_or(|told| warnings.contains(&told.to_owned()));
        assert!(told, "{name}: {warnings:?}");
        // Its keys, and only those.
        let listed = |more: String| {
            contract() + &format!("[[bump]]\nname = \"{name}\"\nkind = \"{name}\"\n{more}")
        };
        if !kind.has_settings() {
            assert!(fault(&listed(String::new())).message.contains("is taken"));
            continue;
        }
        for key in KINDS
            .iter()
            .flat_map(|kind| [kind.numbers, kind.flags].concat())
        {
            let own = kind.numbers.contains(&key) || kind.flags.contains(&key);
            let value = if kind.flags.contains(&key) {
                "true"
            } else {
                "2"
            };
            let set = parse("dibs.toml", &listed(format!("{key} = {value}")));
            assert_eq!(set.is_ok(), own, "{key} of {name}");
        }
    }
}

#[test]
fn weak_choices_are_warned_of() {
    let [warning] = &good(&contract()).warnings()[..] else {
        panic!("once, though the default and a rule use it");
    };
    assert!(warning.starts_with("scramble: text can be recovered from the untrusted path alone"));
    let all = contract()
        .replace("\"closed\"", "\"open\"")
        .replace("= \"on\"", "= \"off\"")
        .replace("\"hold\"", "\"untrusted\"");
    assert_eq!(good(&all).warnings().len(), 4);
    let sealed = contract().replace("\"scramble\"", "\"seal\"");
    assert!(good(&sealed).warnings().is_empty());
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
fn a_missing_file_is_named() {
    let error = load("/nonexistent/dibs.toml".as_ref())
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("/nonexistent/dibs.toml: cannot be read: No such file"),
        "{error}"
    );
}

/// Any text, however broken, is read or refused.
#[test]
fn damaged_files_never_panic() {
    let text = contract();
    for at in (0..text.len()).filter(|at| text.is_char_boundary(*at)) {
        let _ = parse("cut", &text[..at]);
        for damage in ["\"", "[", "=", "\n", "é", "\0", "{", "9"] {
            let _ = parse(
                "damaged",
                &format!("{}{damage}{}", &text[..at], &text[at..]),
            );
        }
    }
}

#[test]
fn a_gateway_names_the_networks_behind_it_and_none_of_a_peers() {
    let with = |networks: &str| {
        let key = format!("default_bump     = \"scramble\"\ngateway = {networks}");
        contract().replace("default_bump     = \"scramble\"", &key)
    };
    let config = good(&with("[\"192.168.7.0/24\", \"fd00:7::/64\"]"));
    let expected = ["192.168.7.0/24", "fd00:7::/64"].map(|net| net.parse().unwrap());
    assert_eq!(config.daemon.gateway, expected);
    for (networks, said) in [
        (
            "[\"10.0.1.0/24\"]",
            "10.0.1.0/24, of which addresses are peer \"server\"'s",
        ),
        (
            "[\"10.0.1.2\"]",
            "10.0.1.2/32, of which addresses are peer \"server\"'s",
        ),
        (
            "[\"192.168.7.0/24\", \"192.168.7.0/24\"]",
            "has 192.168.7.0/24 twice",
        ),
        ("[\"192.168.7.1/24\"]", "192.168.7.0/24"),
        ("[\"127.0.0.0/8\"]", "loopback"),
        ("[]", "gateway is empty"),
        ("\"192.168.7.0/24\"", "list"),
    ] {
        let error = dibs_config::parse("f", &with(networks))
            .unwrap_err()
            .to_string();
        assert!(error.contains(said), "{networks}: {error}");
    }
}

#[test]
fn paths_have_roles_and_limits_and_one_may_be_preferred() {
    let with = |more: &str, end: &str| {
        let address = "address = \"10.0.2.1\"";
        contract().replace(address, &format!("{address}\n{more}")) + end
    };
    let config = good(&contract());
    assert_eq!(config.prefer, None);
    assert!(
        config
            .paths
            .iter()
            .all(|path| path.usage == PathUsage::default())
    );

    let limits = "role = \"backup\"\nrate = \"20 Mbit\"\nvolume = \"10 GB\"";
    let config = good(&with(limits, "\n[prefer]\npath = \"wlan\"\n"));
    let wlan = config.paths[1].usage;
    assert_eq!(wlan.role, Role::Backup);
    assert_eq!(wlan.rate.map(|rate| rate.bits()), Some(20_000_000));
    assert_eq!(
        wlan.volume.map(|volume| volume.bytes()),
        Some(10_000_000_000)
    );
    let prefer = |weight, delta| Prefer {
        path: "wlan".to_owned(),
        weight,
        delta,
    };
    assert_eq!(config.prefer, Some(prefer(100, 2.0)));
    let section = "\n[prefer]\npath = \"wlan\"\nweight = 0\ndelta = 1\n";
    assert_eq!(good(&with("", section)).prefer, Some(prefer(0, 1.0)));

    for (end, said) in [
        (
            "path = \"wlna\"",
            "path \"wlna\" is no path; hint: did you mean \"wlan\"?",
        ),
        ("weight = 1", "[prefer] lacks \"path\""),
        (
            "path = \"wlan\"\nweight = 10001",
            "weight has to be within 0 and 10000",
        ),
        (
            "path = \"wlan\"\ndelta = 0.9",
            "delta has to be within 1 and 1000",
        ),
        (
            "path = \"wlan\"\ncolour = 1",
            "unknown key \"colour\" in [prefer]",
        ),
    ] {
        let found = fault(&with("", &format!("\n[prefer]\n{end}\n"))).to_string();
        assert!(found.contains(said), "{found}");
    }
    let never = with("role = \"never\"", "\n[prefer]\npath = \"wlan\"\n");
    let found = fault(&never).to_string();
    assert!(found.contains("path \"wlan\" is never used"), "{found}");
}

#[test]
fn each_scheduler_is_known() {
    for scheduler in Scheduler::ALL {
        let text = contract().replace("\"balanced\"", &format!("\"{scheduler}\""));
        assert_eq!(good(&text).daemon.scheduler, scheduler);
    }
}

#[test]
fn a_rule_may_have_a_scheduler_where_addresses_and_ports_say_whose() {
    let with = |lines: &str| contract() + "\n[[rule]]\nbump = \"seal\"\n" + lines;
    let rule = "dport = 22\nsource = \"10.0.1.1/32\"\ntime = \"08:00-18:00\"\n";
    let config = good(&with(&format!("{rule}scheduler = \"redundant\"\n")));
    let schedulers: Vec<_> = config.rules.iter().map(|rule| rule.scheduler).collect();
    assert_eq!(schedulers, [None, Some(Scheduler::Redundant)]);
    for (line, key) in [
        ("uid = 0", "uid"),
        ("user = \"root\"", "user"),
        ("gid = 0", "gid"),
        ("interface = \"eth0\"", "interface"),
        ("dscp = \"EF\"", "dscp"),
        ("match = \"-m length --length 0:99\"", "match"),
    ] {
        let text = with(&format!("{line}\nscheduler = \"redundant\"\n"));
        let number = text.lines().count();
        assert_eq!(
            fault(&text).to_string(),
            format!(
                "dibs.toml:{number}:1: a rule with {key} cannot have a scheduler: who shares out data over the paths \
                 sees addresses and ports alone; hint: name it by ports, addresses, time"
            )
        );
    }
    let wrong = fault(&with("scheduler = \"redundand\"\n")).to_string();
    assert!(
        wrong.ends_with("scheduler cannot be \"redundand\"; hint: did you mean \"redundant\"?"),
        "{wrong}"
    );
}

#[test]
fn something_has_to_be_carried() {
    let never = |text: &str, trust: &str| {
        text.replace(
            &format!("trust = \"{trust}\""),
            &format!("trust = \"{trust}\"\nrole = \"never\""),
        )
    };
    let one = never(&contract(), "trusted");
    let warnings = good(&one).warnings();
    let says = |warning: &String| warning.contains("every trusted path has the role never");
    assert!(warnings.iter().any(says), "{warnings:?}");
    let other = good(&never(&contract(), "untrusted")).warnings();
    assert!(!other.iter().any(says), "{other:?}");
    let found = fault(&never(&one, "untrusted")).to_string();
    assert!(
        found.starts_with("dibs.toml:19:8: every path has the role never"),
        "{found}"
    );
}
