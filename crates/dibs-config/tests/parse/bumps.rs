//! Bumps and their settings.

use dibs_config::{BuiltIn, parse};

use super::{contract, fault, good};

#[test]
fn devices_end_where_marks_end() {
    let device = |i| format!("[[bump]]\nname = \"b{i}\"\nkind = \"device\"\ndevice = \"tun{i}\"\n");
    let devices = |n: u32| contract() + &(0..n).map(device).collect::<String>();
    assert_eq!(good(&devices(6)).bumps.len(), BuiltIn::usual(0).len() + 7);
    assert!(fault(&devices(7)).message.contains("more than 7"));
}

#[test]
fn sharing_and_sealing_have_settings() {
    let with = |bump: &str| contract() + "[[bump]]\n" + bump;
    let of = |text: &str, name: &str| {
        let config = good(text);
        let bump = config.bump(name).unwrap();
        bump.built_in().unwrap()
    };
    assert_eq!(of(&contract(), "share").shares(), Some((2, 2)), "all paths");
    let third = "[[path]]\nname = \"lte\"\ninterface = \"lte0\"\ntrust = \"untrusted\"\n";
    let two_of_three = with("name = \"share\"\nkind = \"share\"\nneeded = 2\n") + third;
    assert_eq!(of(&two_of_three, "share").shares(), Some((2, 3)));
    let padded = with("name = \"seal\"\nkind = \"seal\"\npadding = true\n");
    for (text, padding) in [(padded, true), (contract(), false)] {
        assert_eq!(of(&text, "seal"), BuiltIn::Seal { padding });
    }
    for (bump, says) in [
        (
            "name = \"share\"\nkind = \"share\"\nshares = 3\n",
            "the file has 2 path(s)",
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
    let why = "needs 2 paths or more; hint: write \"seal\"";
    assert!(refused.contains(why), "{refused}");
    let twice = "name = \"seal\"\nkind = \"seal\"\n";
    let twice = with(twice) + "[[bump]]\n" + twice;
    assert!(fault(&twice).message.contains("listed twice"));
}

#[test]
fn each_that_is_built_in_is_known_by_its_name() {
    let kept = "default_bump     = \"scramble\"";
    let all = BuiltIn::usual(2);
    for &built_in in &all {
        let (name, keys) = (built_in.name(), built_in.keys());
        let used = contract().replace(kept, &format!("default_bump = \"{name}\""));
        let used = used + &format!("[[rule]]\nbump = \"{name}\"\ndport = 81\n");
        let config = good(&used);
        config.check_carried().unwrap();
        assert_eq!(config.bump(name).unwrap().built_in(), Some(built_in));
        let warnings = config.warnings();
        let told = built_in
            .warning()
            .is_none_or(|told| warnings.contains(&told.to_owned()));
        assert!(told, "{name}: {warnings:?}");
        // Its keys, and only those.
        let listed = |more: String| {
            contract() + &format!("[[bump]]\nname = \"{name}\"\nkind = \"{name}\"\n{more}")
        };
        if keys.is_empty() {
            assert!(fault(&listed(String::new())).message.contains("is taken"));
            continue;
        }
        for key in all.iter().flat_map(|bump| bump.keys().iter().copied()) {
            let value = if key == "padding" { "true" } else { "2" };
            let set = parse("dibs.toml", &listed(format!("{key} = {value}")));
            assert_eq!(set.is_ok(), keys.contains(&key), "{key} of {name}");
        }
    }
}
