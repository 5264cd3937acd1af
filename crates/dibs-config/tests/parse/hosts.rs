//! Paths, peers, and what lies behind them.

use dibs_config::{PathUsage, Prefer};
use dibs_settings::{Opening, Role};

use super::{KEY, KEY2, contract, fault, good, refused};

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
            "is also that of peer \"server\"",
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
            said.contains("neither a port nor an address with port"),
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
    assert!(fault(&twice).message.contains("is also that of path \"a\""));
    // Two paths of one pattern take two interfaces.
    let by = |at: &str| twice.replace("address = \"10.0.1.1\"", &format!("interface = \"{at}\""));
    assert_eq!(good(&by("wwan*")).paths[1].pattern(), Some("wwan*"));
    assert!(
        fault(&by("wwan0"))
            .message
            .contains("is also that of path \"a\"")
    );
    let neither = "[[path]]\nname = \"a\"\ntrust = \"trusted\"\n";
    assert!(fault(neither).message.contains("lacks \"interface\""));
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
            "10.0.1.0/24, which shares addresses with peer \"server\"",
        ),
        (
            "[\"10.0.1.2\"]",
            "10.0.1.2/32, which shares addresses with peer \"server\"",
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

/// Addresses that stand for others: a peer's that has none of its own, and those of a path that are translated.
#[test]
fn addresses_may_stand_for_others() {
    let addresses = "addresses = [\"10.0.1.2/32\"]";
    let with = |line: &str| contract().replacen(addresses, line, 1);
    let peer = good(&with("appears_as = [\"10.77.0.2\", \"fd77::2\"]"))
        .peers
        .remove(0);
    let nets: Vec<String> = peer.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(nets, ["10.77.0.2/32", "fd77::2/128"]);
    let both = format!("{addresses}\nappears_as = \"10.77.0.2\"");
    assert_eq!(good(&with(&both)).peers[0].addresses.len(), 2);

    for (line, part) in [
        ("", "[[peer]] lacks \"addresses\""),
        ("appears_as = []", "[[peer]] lacks \"addresses\""),
        (
            "appears_as = [\"10.77.0.2\", \"10.77.0.3\"]",
            "more than one address of an IP version",
        ),
        (
            "appears_as = \"127.0.0.1\"",
            "is not an address of one host",
        ),
        ("appears_as = \"10.77.0.0/24\"", "is not an address"),
        (
            "addresses = [\"10.77.0.2\"]\nappears_as = \"10.77.0.2\"",
            "10.77.0.2/32 twice",
        ),
    ] {
        let message = fault(&with(line)).to_string();
        assert!(message.contains(part), "{line}: {message}");
    }

    let trust = "trust = \"trusted\"";
    let path = |public: &str| contract().replacen(trust, &format!("{trust}\npublic = {public}"), 1);
    let public = good(&path("\"203.0.113.7\"")).paths.remove(0).public;
    assert_eq!(public, [[203, 0, 113, 7].into()] as [std::net::IpAddr; 1]);
    let message = fault(&path("[\"203.0.113.7\", \"203.0.113.8\"]")).to_string();
    assert!(
        message.contains("more than one address of an IP version"),
        "{message}"
    );
}

#[test]
fn every_address_may_be_behind_a_peer_beside_the_networks_here() {
    let text = |accept: &str, gateway: &str| {
        let daemon = format!("default_bump     = \"scramble\"\ngateway = [\"{gateway}\"]");
        let text = contract().replace("default_bump     = \"scramble\"", &daemon);
        let wide = format!("{accept}addresses = [\"0.0.0.0/0\", \"::/0\", ");
        text.replacen("addresses = [", &wide, 1)
    };
    let config = good(&text("", "192.168.7.0/24"));
    // Nobody calls here in the name of whom they like, unless it is said.
    assert_eq!(config.peers[0].accept, []);
    let config = good(&text("accept = [\"22\"]\n", "192.168.7.0/24"));
    assert_eq!(config.peers[0].accept.len(), 1);
    assert_eq!(config.daemon.exits(), []);
    let both = dibs_config::parse("f", &text("", "10.0.1.0/24"));
    assert!(
        both.unwrap_err()
            .to_string()
            .contains("shares addresses with peer")
    );
}

#[test]
fn an_exit_leads_everywhere_unless_it_says_where() {
    let with = |lines: &str| {
        let key = format!("default_bump     = \"scramble\"\n{lines}");
        good(&contract().replace("default_bump     = \"scramble\"", &key))
    };
    let nets = |texts: &[&str]| -> Vec<ipnet::IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    };
    assert_eq!(
        with("exit = true").daemon.exits(),
        nets(&["0.0.0.0/0", "::/0"])
    );
    let some = with("exit = true\nexit_to = [\"0.0.0.0/0\", \"10.8.0.0/16\"]");
    assert_eq!(some.daemon.exits(), nets(&["0.0.0.0/0", "10.8.0.0/16"]));
    assert!(some.daemon.forwards() && !with("").daemon.forwards());
}
