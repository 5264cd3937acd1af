//! From a configuration file to what the node and the kernel are told.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use dibs_config::{Config, PrivateKey};
use dibs_control::{Match, NewRule, Selector, Terms};
use dibs_io::LocalTime;
use dibs_policy::{ClassRule, Desired, Fail, Hours, Plan};
use dibs_settings::{BumpId, Term};
use dibs_switch::rules::Fit;
use dibsd::data::bumps;
use dibsd::host::interfaces::{Interface, Inventory};
use dibsd::rulebook::kept;
use dibsd::rulebook::rules::{of_file, of_user};
use dibsd::rulebook::state_file::FIRST_USER_RULE;
use dibsd::switch::startup;

const PEER: &str = "Z7di2cstr/9mOBVZdefFsSHj9M56dAUbCXAbv8M28CU=";

/// A file with `more` in its `[daemon]` section and `rest` at its end.
fn text(more: &str, rest: &str) -> String {
    format!(
        "[daemon]\n{more}\n\
         [[path]]\nname = \"eth\"\ninterface = \"eth0\"\ntrust = \"trusted\"\n\
         [[path]]\nname = \"wlan\"\ninterface = \"wlan0\"\ntrust = \"untrusted\"\n\
         [[peer]]\nname = \"server\"\npublic_key = \"{PEER}\"\n\
         addresses = [\"10.0.1.2/32\", \"fd00:1::/64\"]\n\
         [peer.endpoints]\neth = \"10.0.1.2:5300\"\n{rest}"
    )
}

fn config(more: &str, rest: &str) -> Config {
    dibs_config::parse("dibsd.toml", &text(more, rest)).expect("a right file")
}

fn refusal(more: &str, rest: &str) -> String {
    let error = startup::check(&config(more, rest)).expect_err("not carried");
    error.to_string()
}

fn inventory() -> Inventory {
    let interface = |index, name: &str, up, addresses: &[&str]| Interface {
        index,
        name: name.to_owned(),
        altnames: Vec::new(),
        up,
        mtu: 1500,
        addresses: addresses.iter().map(|a| a.parse().unwrap()).collect(),
    };
    Inventory::of(vec![
        interface(1, "lo", true, &["127.0.0.1"]),
        interface(2, "eth0", true, &["10.0.1.1", "fd00:2::1"]),
        interface(3, "wlan0", false, &[]),
        interface(4, "dibs1", true, &["10.0.1.1", "10.9.9.9"]),
    ])
}

/// Eight o'clock, two hours east.
fn morning() -> LocalTime {
    LocalTime {
        second_of_day: 8 * 3600,
        nanos: 0,
        utc_offset: 2 * 3600,
    }
}

fn scramble() -> BumpId {
    bumps::carried(&config("", ""))[0].id
}

#[test]
fn what_is_not_carried_is_refused_at_its_place() {
    let rule = |more: &str| format!("[[rule]]\nbump = \"scramble\"\n{more}\n");
    let ports: Vec<String> = (1..=257).map(|port| port.to_string()).collect();
    let single = format!("dport = [{}]", ports.join(", "));
    let error = refusal("", &rule(&single));
    assert!(error.starts_with("dibsd.toml:19:"), "{error}");
    assert!(
        error.contains("this version of dibsd does not support"),
        "{error}"
    );
    assert!(error.contains("combinations"), "{error}");
    assert!(startup::check(&config("", &rule("dport = [80, \"1024-65535\"]"))).is_ok());
}

#[test]
fn the_shipped_examples_are_carried() {
    let configs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    for name in ["minimal.toml", "host-a.toml", "host-b.toml"] {
        startup::load(&configs.join(name)).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn the_node_is_told_of_paths_peers_and_addresses() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("key");
    fs::write(&key, PrivateKey::generate().to_base64().as_bytes()).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let file = format!(
        "private_key_file = \"{}\"\ntrusted_share = 0.25\non_trusted_down = \"untrusted\"",
        key.display()
    );
    let config = config(&file, "");
    let mut node = startup::node_config(&config, &inventory()).unwrap();
    let paths: Vec<_> = node
        .paths
        .iter()
        .map(|p| (p.trusted, p.up, p.mtu))
        .collect();
    let down_as_yet = [(true, false, 1500), (false, false, 1500)];
    assert_eq!(paths, down_as_yet, "their sockets are not open");
    assert_eq!(node.peers.len(), 1);
    let mut again = startup::node_config(&config, &inventory()).unwrap();
    let mut pads = [[0; 32]; 2];
    node.pads.fill(&mut pads[0]);
    again.pads.fill(&mut pads[1]);
    assert_ne!(pads[0], pads[1], "each start draws its own seed");
    assert_eq!(
        node.peers[0].public.as_bytes(),
        config.peers[0].public_key.as_bytes()
    );
    assert!(node.peers[0].preshared.is_none());
    assert_eq!(
        node.peers[0].endpoints,
        [(0, "10.0.1.2:5300".parse().unwrap())]
    );
    assert!(node.peers[0].prefixes[1].contains(&"fd00:1::77".parse::<std::net::IpAddr>().unwrap()));
    let addresses: Vec<String> = node.addresses.iter().map(ToString::to_string).collect();
    assert_eq!(addresses, ["10.0.1.1", "fd00:2::1"]);
    assert_eq!(node.trusted_share, 0.25);
    assert!(!node.hold_without_trusted);

    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
    let error = startup::node_config(&config, &inventory())
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("chmod 600"), "{error}");
}

#[test]
fn a_rule_of_the_file_becomes_each_combination() {
    let rest = "[[rule]]\nbump = \"scramble\"\ndport = [80, \"8000-8001\"]\nuid = 1000\n\
                destination = [\"10.0.1.2/32\", \"fd00:1::/64\"]\n";
    let config = config("", rest);
    let rule = of_file(3, &config.rules[0], Some(scramble()), morning()).unwrap();
    let shown = |class: &ClassRule| {
        let destination = class.destination.unwrap().to_string();
        (class.dport.unwrap().to_string(), destination)
    };
    let combinations: BTreeSet<(String, String)> = rule.classes.iter().map(shown).collect();
    // A range is one.
    assert_eq!(combinations.len(), 4);
    assert_eq!(rule.classes.len(), 4);
    assert!(combinations.contains(&("8000:8001".to_owned(), "fd00:1::/64".to_owned())));
    assert!(
        rule.classes
            .iter()
            .all(|class| class.uid == Some(1000) && class.id == 3)
    );
    assert_eq!(rule.info().selector["dport"], "80,8000-8001");

    let local = "10.0.1.1:40000".parse().unwrap();
    let matches =
        |remote: &str, uid| rule.matches(local, remote.parse().unwrap(), Some(uid)) == Fit::Means;
    assert!(matches("10.0.1.2:8001", 1000));
    assert!(!matches("10.0.1.2:8002", 1000));
    assert!(!matches("10.0.1.3:8001", 1000));
    assert!(!matches("10.0.1.2:8001", 1001));
}

#[test]
fn what_only_the_kernel_can_tell_is_left_to_it() {
    let rest = "[[rule]]\nbump = \"scramble\"\ndport = 80\ninterface = \"eth0\"\ndscp = \"EF\"\n\
                match = \"-m length --length 0:99\"\n";
    let config = config("", rest);
    let rule = of_file(1, &config.rules[0], Some(scramble()), morning()).unwrap();
    let class = &rule.classes[0];
    assert_eq!(
        class.interface.as_ref().map(|name| name.as_str()),
        Some("eth0")
    );
    let matches = Term::parse("match", "-m length --length 0:99").unwrap();
    assert_eq!(class.terms, [Term::Dscp(46), matches]);
    let [local, http, other] =
        ["10.0.1.1:40000", "10.0.1.2:80", "10.0.1.2:81"].map(|end| end.parse().unwrap());
    assert_eq!(rule.matches(local, http, Some(0)), Fit::May);
    assert_eq!(rule.matches(local, other, Some(0)), Fit::Not);
}

#[test]
fn a_rule_holds_at_its_time_of_day_and_is_always_in_the_kernel() {
    let rest = "[[rule]]\nbump = \"scramble\"\ntime = \"22:00-08:01\"\n";
    let config = config("", rest);
    let mut rule = of_file(1, &config.rules[0], Some(scramble()), morning()).unwrap();
    assert!(rule.holds && rule.info().active);
    let at = |hour: u32, minute: u32| LocalTime {
        second_of_day: hour * 3600 + minute * 60,
        ..morning()
    };
    assert!(!rule.turn(at(8, 0)), "no news");
    assert!(rule.turn(at(8, 1)) && !rule.holds && !rule.info().active);
    let hours: Vec<_> = rule
        .kernel_classes(morning().utc_offset)
        .map(|class| class.hours)
        .collect();
    assert_eq!(
        hours,
        [Some(Hours {
            start: 20 * 3600,
            end: 6 * 3600 + 60
        })]
    );
}

fn named(terms: &[(&str, &str)]) -> Terms {
    terms
        .iter()
        .map(|(key, text)| (*key, (*text).to_owned()))
        .collect()
}

#[test]
fn users_name_in_words_what_the_file_does() {
    let config = config("", "");
    let make = |change: fn(&mut NewRule)| {
        let mut wanted = NewRule::new(Selector::All, "scramble");
        change(&mut wanted);
        let behind = |_: &str| Some(config.peers[0].addresses.clone());
        of_user(
            FIRST_USER_RULE,
            &wanted,
            0,
            Some(scramble()),
            morning(),
            behind,
        )
    };
    let made = make(|rule| {
        rule.terms = named(&[("time", "08:00-18:00"), ("dscp", "EF")]);
        rule.priority = 4;
        rule.prefer = true;
    });
    let made = made.unwrap();
    let terms = [("dscp", "46"), ("time", "08:00-18:00")]
        .map(|(key, value)| (key.to_owned(), value.to_owned()));
    assert_eq!(made.selector, terms.into());
    assert_eq!((made.priority, made.info().prefer), (4, true));
    let said = |change| make(change).unwrap_err();
    assert!(said(|rule| rule.terms = named(&[("time", "8-18")])).starts_with("time "));
    assert!(said(|rule| rule.terms = named(&[("match", "-j ACCEPT")])).starts_with("match "));
    assert!(
        said(|rule| rule.terms = named(&[("interface", "eth0 -j X")])).starts_with("interface ")
    );
    let both = said(|rule| {
        rule.terms = named(&[("gid", "7")]);
        rule.require = true;
    });
    assert!(both.starts_with("a rule with gid cannot require"), "{both}");
    // A rule of the user stands against one of the file as two of the file do.
    let usual = make(|rule| rule.priority = 3).unwrap();
    let other = dibsd::rulebook::rules::contradicted(&made, std::slice::from_ref(&usual));
    assert_eq!(other, None);
    let mut same = usual.clone();
    same.bump = "seal".to_owned();
    let why = dibsd::rulebook::rules::contradicted(&same, &[usual]).unwrap();
    assert_eq!(
        why,
        "it selects the same connections as rule 1000, for \"scramble\""
    );
}

#[test]
fn a_rule_for_an_unknown_user_is_refused() {
    let config = config(
        "",
        "[[rule]]\nbump = \"scramble\"\nuser = \"nobody-of-this-name\"\n",
    );
    let error = of_file(1, &config.rules[0], Some(scramble()), morning()).unwrap_err();
    assert_eq!(error, "there is no user \"nobody-of-this-name\"");
}

#[test]
fn a_rule_of_the_user_reaches_what_both_peer_and_destination_mean() {
    let config = config("", "");
    let make = |wanted: Match| {
        of_user(
            FIRST_USER_RULE,
            &NewRule::new(Selector::Match(wanted), "scramble"),
            0,
            Some(scramble()),
            morning(),
            |name| (name == "server").then(|| config.peers[0].addresses.clone()),
        )
    };
    let destinations = |wanted: Match| -> Vec<String> {
        let classes = make(wanted).unwrap().classes;
        let shown = |class: &ClassRule| class.destination.map(|d| d.to_string());
        classes
            .iter()
            .map(|class| shown(class).unwrap_or_default())
            .collect()
    };
    let peer = || Match {
        peer: Some("server".to_owned()),
        ..Match::default()
    };
    assert_eq!(
        destinations(Match {
            dport: Some(80),
            ..Match::default()
        }),
        [""]
    );
    assert_eq!(destinations(peer()), ["10.0.1.2/32", "fd00:1::/64"]);
    let narrowed = |dst: &str| Match {
        dst: dst.parse().ok(),
        ..peer()
    };
    assert_eq!(destinations(narrowed("fd00:1::7/128")), ["fd00:1::7/128"]);
    assert_eq!(destinations(narrowed("10.0.0.0/8")), ["10.0.1.2/32"]);
    assert!(make(narrowed("10.0.2.0/24")).is_err());
    let unknown = Match {
        peer: Some("other".to_owned()),
        ..Match::default()
    };
    assert_eq!(make(unknown).unwrap_err(), "there is no peer \"other\"");
    let process = Match {
        pid: Some(1),
        ..Match::default()
    };
    assert!(make(process).is_err());
    let mixed = Match {
        src: "10.0.1.1/32".parse().ok(),
        dst: "fd00:1::/64".parse().ok(),
        ..Match::default()
    };
    assert!(make(mixed).is_err());
}

#[test]
fn nothing_in_use_is_nothing_installed() {
    let config = config("", "[[rule]]\nbump = \"scramble\"\ndport = 80\n");
    let rule = of_file(1, &config.rules[0], Some(scramble()), morning()).unwrap();
    let addresses = inventory().host_addresses(BumpId::is_tun);
    let classes = || rule.classes.iter().cloned();
    let host = inventory();
    let idle = kept::desired(&config, &host, classes(), &BTreeSet::new(), &addresses);
    assert!(Plan::new(&idle).unwrap().is_empty());
    assert_eq!(idle, Desired::default());

    let used = kept::desired(
        &config,
        &host,
        classes(),
        &BTreeSet::from([scramble()]),
        &addresses,
    );
    assert_eq!(used.validate(), Ok(()));
    assert_eq!(used.rules, rule.classes);
    assert_eq!(used.bumps[0].device.as_str(), "dibs1");
    assert_eq!(used.bumps[0].addresses, addresses);
    assert_eq!(used.bumps[0].peers.len(), 2);
}

#[test]
fn settings_reach_the_kernel() {
    let more = "fail = \"open\"\ntable_base = 7000\nmark_mask = 0xff00";
    let config = config(more, "");
    let used = BTreeSet::from([scramble()]);
    let wish = kept::desired(&config, &inventory(), std::iter::empty(), &used, &[]);
    assert_eq!(wish.fail, Fail::Open);
    assert_eq!(wish.table_base, 7000);
    // Of a longer run the lowest six bits.
    assert_eq!(wish.marks.mask(), 0x3f00);
}

/// A rule that a user made, for connections to this port.
fn made_by(
    by: u32,
    id: u64,
    bump: &str,
    change: impl FnOnce(&mut NewRule),
) -> dibsd::rulebook::rules::Rule {
    let mut wanted = NewRule::new(
        Selector::Match(Match {
            dport: Some(80),
            uid: (by != 0).then_some(by),
            ..Match::default()
        }),
        bump,
    );
    change(&mut wanted);
    of_user(id, &wanted, by, Some(scramble()), morning(), |_| None).unwrap()
}

#[test]
fn root_comes_before_members_of_the_group_whatever_their_priority() {
    let mut rules = [
        made_by(1000, 1000, "seal", |rule| rule.priority = i32::MAX),
        made_by(0, 1001, "scramble", |rule| rule.priority = -5),
        made_by(0, 1002, "scramble", |_| {}),
        made_by(1000, 1003, "seal", |_| {}),
    ];
    rules.sort_by_key(dibsd::rulebook::rules::Rule::order);
    assert_eq!(rules.map(|rule| rule.id), [1002, 1001, 1000, 1003]);
}

#[test]
fn root_displaces_members_and_they_displace_nobody() {
    let displaced = |rule, other: &dibsd::rulebook::rules::Rule| {
        dibsd::rulebook::rules::displaced(rule, std::slice::from_ref(other)).map(|gone| {
            gone.into_iter()
                .map(|(rule, _)| rule.id)
                .collect::<Vec<_>>()
        })
    };
    let require = |rule: &mut NewRule| rule.require = true;
    let roots = made_by(0, 1000, "scramble", require);
    let members = made_by(1000, 1001, "seal", require);
    assert_eq!(displaced(&roots, &members), Ok(vec![1001]));
    let why =
        "it requires another bump of some of the same connections as rule 1000, for \"scramble\"";
    assert_eq!(displaced(&members, &roots), Err(why.to_owned()));
    // What does not contradict stays.
    let usual = made_by(1000, 1002, "seal", |_| {});
    assert_eq!(displaced(&roots, &usual), Ok(vec![]));
    // Of equals the one that is there stays.
    let again = made_by(0, 1003, "seal", require);
    assert!(displaced(&again, &roots).is_err());
    let again = made_by(1000, 1004, "scramble", require);
    assert!(displaced(&again, &members).is_err());
}
