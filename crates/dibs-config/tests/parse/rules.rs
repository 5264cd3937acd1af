//! Rules: which stand, and which stand against each other.

use dibs_config::Level;
use dibs_settings::Scheduler;

use super::{contract, fault, good};

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
                "dibs.toml:{line}:11: require does not work with {key} = \"{open}\"; hint: set {key} = \
                 \"{kept}\" in [daemon], or leave require out"
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
        said.contains(":1: a rule has both require and prefer"),
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
            "dibs.toml:{line}:8: rule 3 selects the same connections as rule 2, for \"scramble\"; \
             hint: give both the same bump, require or prefer, and scheduler, or let them select \
             different connections"
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
                "dibs.toml:{number}:1: a rule with {key} cannot have a scheduler, because the scheduler sees only \
                 addresses and ports; hint: select by ports, addresses, time"
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
fn a_rule_for_every_connection_says_so() {
    let with = |lines: &str| contract() + "\n[[rule]]\nbump = \"seal\"\n" + lines;
    let line = with("").lines().count() - 1;
    for nothing in ["", "all = false", "require = true", "priority = 3"] {
        assert_eq!(
            fault(&with(nothing)).to_string(),
            format!(
                "dibs.toml:{line}:1: [[rule]] names no connections: it has neither ports, addresses nor users; \
                 hint: name them, such as dport = 443, or write all = true for every TCP connection to the peers"
            ),
            "{nothing}"
        );
    }
    for selects in [
        "all = true",
        "all = true\nrequire = true",
        "all = true\ntime = \"08:00-18:00\"",
        "all = true\nmatch = \"-m tos --tos 8\"",
        "all = false\ndport = 22",
    ] {
        good(&with(selects));
    }
    // What selects in part is taken as it was.
    for part in ["time = \"08:00-18:00\"", "gid = 7", "dscp = \"EF\""] {
        good(&with(part));
    }
    for (line, key) in [
        ("dport = 22", "dport"),
        ("sport = 22", "sport"),
        ("source = \"10.0.1.1/32\"", "source"),
        ("destination = \"10.0.1.2/32\"", "destination"),
        ("uid = 0", "uid"),
        ("user = \"root\"", "user"),
    ] {
        let said = fault(&with(&format!("{line}\nall = true"))).to_string();
        let expected = format!(
            ":1: a rule with all = true selects every connection, and {key} does not; hint: delete one of them"
        );
        assert!(said.ends_with(&expected), "{said}");
    }
    let apart = "source = \"10.0.1.1/32\"\ndestination = \"fd00:1::2/128\"";
    let said = fault(&with(apart)).to_string();
    assert!(
        said.contains("[[rule]] selects nothing: each source"),
        "{said}"
    );
    for name in ["lo", "eth0:1", "@x", "all"] {
        let said = fault(&with(&format!("interface = \"{name}\""))).to_string();
        assert!(
            said.contains("is not an interface that leads to a peer"),
            "{said}"
        );
    }
}

#[test]
fn a_direct_rule_has_neither_level_nor_scheduler() {
    let with = |lines: &str| format!("{}\n[[rule]]\nbump = \"direct\"\n{lines}\n", contract());
    let config = good(&with("dport = 443"));
    assert_eq!(
        config.rules.last().map(|rule| rule.bump.as_str()),
        Some("direct")
    );
    for line in [
        "require = true",
        "prefer = true",
        "scheduler = \"redundant\"",
        "gid = 7",
    ] {
        let said = fault(&with(&format!("dport = 443\n{line}"))).to_string();
        assert!(said.contains("directly"), "{said}");
    }
}
