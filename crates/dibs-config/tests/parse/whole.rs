//! Whole files: what is read of them, left out, warned of, and refused.

use dibs_config::BuiltIn;
use dibs_config::{Endpoint, Fail, Integrity, Level, OnTrustedDown, Trust, load, parse};
use dibs_settings::Scheduler;

use super::{KEY, contract, fault, good};

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
    let endpoint = |path: &str, at: &str| (path.to_owned(), Endpoint::Address(at.parse().unwrap()));
    assert_eq!(
        peer.endpoints,
        [
            endpoint("eth", "10.0.1.2:5300"),
            endpoint("wlan", "10.0.2.2:5300")
        ]
    );

    let bumps: Vec<_> = config.bumps.iter().map(|bump| bump.name.as_str()).collect();
    assert_eq!(bumps[..3], ["scramble", "share", "seal"]);
    assert_eq!(bumps[BuiltIn::usual(0).len()..], ["vpn"]);
    assert_eq!(config.bump("vpn").unwrap().device(), Some("tun9"));

    let [rule] = &config.rules[..] else {
        panic!("{:?}", config.rules)
    };
    let terms = rule.selection.terms();
    let terms: Vec<_> = terms
        .iter()
        .map(|term| (term.key(), term.to_string()))
        .collect();
    let expected = [
        ("dport", "80"),
        ("sport", "1024-65535,7"),
        ("uid", "1000"),
        ("gid", "100"),
        ("destination", "10.0.1.0/24"),
        ("time", "08:00-18:00"),
        ("match", "-m dscp --dscp-class EF"),
    ];
    assert_eq!(terms, expected.map(|(key, text)| (key, text.to_owned())));
    assert_eq!((rule.priority, rule.level), (0, Level::Usual));
}

#[test]
fn all_but_a_path_may_be_left_out() {
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
fn by_which_paths_keys_are_agreed_follows_from_the_paths_unless_it_is_said() {
    use dibs_settings::Handshake;
    let mode = |text: &str| good(text).daemon.handshake;
    assert_eq!(mode(&contract()), Handshake::Chained);
    let says = |handshake: &str| {
        let line = format!("[daemon]\nhandshake = \"{handshake}\"");
        contract().replace("[daemon]", &line)
    };
    for one in Handshake::ALL {
        assert_eq!(mode(&says(one.name())), one);
    }
}

#[test]
fn a_file_without_a_trusted_path_carries_no_scramble() {
    use dibs_settings::Handshake;
    let untrusted = |text: &str| text.replace("\"trusted\"", "\"untrusted\"");
    let text = untrusted(&contract());
    let config = good(&text);
    assert_eq!(config.daemon.handshake, Handshake::Any);
    let lack = config.lack(config.bump("scramble").unwrap()).unwrap();
    assert!(lack.contains("needs a trusted path"), "{lack}");
    for carried in ["seal", "share", "vpn"] {
        assert_eq!(
            config.lack(config.bump(carried).unwrap()),
            None,
            "{carried}"
        );
    }
    let found = config.check_carried().unwrap_err().to_string();
    let expected = "dibs.toml:13:20: the bump \"scramble\" needs a trusted path, and the file has none; hint: \
                    write \"seal\", or add such a path";
    assert_eq!(found, expected);

    let sealed = good(&text.replace("\"scramble\"", "\"seal\""));
    assert!(sealed.check_carried().is_ok());
    let warnings = sealed.warnings();
    assert!(
        warnings.len() == 1 && warnings[0].starts_with("no path is trusted"),
        "{warnings:?}"
    );

    let with = |handshake: &str, text: &str| {
        let line = format!("[daemon]\nhandshake = \"{handshake}\"");
        text.replace("[daemon]", &line)
    };
    let found = fault(&with("trusted", &text)).to_string();
    assert!(
        found.contains(":3:13: handshake \"trusted\" allows no handshake"),
        "{found}"
    );
    // The peer of the contract has a preshared key.
    assert_eq!(
        good(&with("chained", &text)).daemon.handshake,
        Handshake::Chained
    );
    let without = text.replace("preshared_key_file = \"/etc/dibs/psk\"\n", "");
    assert_eq!(good(&without).daemon.handshake, Handshake::Any);
    let found = fault(&with("chained", &without)).to_string();
    assert!(
        found.contains("no first handshake with peer \"server\""),
        "{found}"
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
    let says = |warning: &String| warning.contains("every trusted path is off");
    assert!(warnings.iter().any(says), "{warnings:?}");
    let other = good(&never(&contract(), "untrusted")).warnings();
    assert!(!other.iter().any(says), "{other:?}");
    let found = fault(&never(&one, "untrusted")).to_string();
    assert!(
        found.starts_with("dibs.toml:19:8: every path has the role never"),
        "{found}"
    );
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
fn a_missing_file_is_named() {
    let error = load("/nonexistent/dibs.toml".as_ref())
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("/nonexistent/dibs.toml: cannot be read: No such file")
            && error.ends_with(": dibsctl init makes one"),
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
