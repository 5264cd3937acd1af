//! Members of the daemon's group beside root and beside each other: what they see, what they may, and how much.

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::member::Member;
use netns_tests::topology::server;
use netns_tests::traffic::Talk;
use netns_tests::{Net, Setup, isolated_with_users};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// As high as it goes.
const HIGHEST: &str = "2147483647";

/// Makes a rule for the member's own connections.
fn add(member: &Member<'_>, uid: &str, arguments: &[&str]) -> Result<String> {
    let made = member.ctl(&[&["rule", "add", "--uid", uid], arguments].concat())?;
    Ok(made["id"].to_string())
}

/// The numbers in a list of rules.
fn ids(rules: &Value) -> Vec<String> {
    let rules = rules.as_array().into_iter().flatten();
    rules.map(|rule| rule["id"].to_string()).collect()
}

fn events(printed: &str) -> Vec<Value> {
    let lines = printed.lines();
    lines
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

/// Waits until an event of a rule was heard.
fn wait_event(printed: impl Fn() -> String, kind: &str, rule: &str) -> Result<Vec<Value>> {
    let is_it = |event: &Value| event["kind"] == kind && event["fields"]["rule"] == rule;
    wait(&format!("{kind} of rule {rule}"), || {
        events(&printed()).iter().any(is_it)
    })?;
    Ok(events(&printed()))
}

#[test]
fn members_see_what_is_their_own_and_root_sees_all() {
    isolated_with_users(|| {
        Setup::new()
            .rule("bump = \"seal\"\ndport = 7009")
            .run(|net| {
                let (one, other) = (net.a.member(1000)?, net.a.member(1001)?);
                let of_root = net.a.events()?;
                let of_one = one.events()?;
                // Something of his own that is told, until it is heard.
                wait("events to be followed", || {
                    let made = add(&one, "1000", &["--dport", "9", "--bump", "seal"]);
                    let gone = made.and_then(|id| one.ctl(&["rule", "del", &id]));
                    gone.is_ok() && of_one.stdout().contains("rule_added")
                })?;

                let his = add(&other, "1001", &["--dport", "80", "--bump", "seal"])?;
                let for_one = ["rule", "add", "--uid", "1000", "--dport", "81"];
                let for_one = net.a.ctl(&[&for_one[..], &["--bump", "seal"]].concat())?;
                let for_one = for_one["id"].to_string();
                let own = add(&one, "1000", &["--dport", "82", "--bump", "seal"])?;
                ensure!(
                    ids(&net.a.ctl(&["rule", "list"])?) == ["1", &for_one, &his, &own],
                    "{:#}",
                    net.a.ctl(&["rule", "list"])?
                );
                let seen = one.ctl(&["rule", "list"])?;
                ensure!(ids(&seen) == [for_one.as_str(), &own], "{seen:#}");
                let seen = other.ctl(&["rule", "list"])?;
                ensure!(ids(&seen) == [his.as_str()], "{seen:#}");
                let said = one.refused(&["rule", "del", &his])?;
                ensure!(said.contains(&format!("no rule {his} of yours")), "{said}");
                let said = one.refused(&["rule", "del", &for_one])?;
                ensure!(said.contains("root's: use sudo"), "{said}");
                let said = one.refused(&["rule", "add", "--dport", "83", "--bump", "seal"])?;
                ensure!(said.contains("add --uid 1000"), "{said}");

                // Connections: one of root's and one of his.
                let roots = net.talk(7000)?;
                let far = &net.b.host;
                let ends = one.connect(far, server(7001))?;
                let ones = Talk::over(&net.a.host, far, ends)?;
                let conns = one.ctl(&["conn", "list"])?;
                let conns = conns.as_array().context("a list")?;
                ensure!(
                    conns.len() == 1 && conns[0]["uid"] == 1000,
                    "sees {conns:#?}"
                );
                let others = other.ctl(&["conn", "list"])?;
                ensure!(others == json!([]), "sees {others:#}");
                let said = one.refused(&["enable", "--dport", "7000"])?;
                ensure!(said.contains("no live connection"), "{said}");
                // Root moves both, and each hears of as many as are his.
                net.a
                    .ctl(&["enable", "--dst", "10.0.1.2", "--bump", "seal"])?;
                one.ctl(&["rule", "del", &own])?;

                let heard = wait_event(|| of_one.stdout(), "rule_deleted", &own)?;
                let about = |heard: &[Value], id: &str| {
                    let fields = heard.iter().map(|event| event["fields"]["rule"].clone());
                    fields.filter(|rule| rule == id).count()
                };
                ensure!(about(&heard, &his) == 0, "{heard:#?}");
                ensure!(about(&heard, &for_one) == 1, "{heard:#?}");
                let moved = |heard: &[Value]| -> Vec<Value> {
                    let moved = heard.iter().filter(|event| event["kind"] == "enabled");
                    moved
                        .map(|event| event["fields"]["count"].clone())
                        .collect()
                };
                ensure!(moved(&heard) == ["1"], "{heard:#?}");
                let heard = wait_event(|| of_root.stdout(), "rule_deleted", &own)?;
                ensure!(about(&heard, &his) == 1, "{heard:#?}");
                ensure!(moved(&heard) == ["2"], "{heard:#?}");
                [roots, ones].into_iter().try_for_each(Talk::finish)
            })
    });
}

#[test]
fn root_displaces_what_a_member_requires_and_both_hear_of_it() {
    isolated_with_users(|| {
        Setup::new().run(|net| {
            let member = net.a.member(1000)?;
            let (of_root, of_member) = (net.a.events()?, member.events()?);
            wait("events to be followed", || {
                let made = add(&member, "1000", &["--dport", "9", "--bump", "seal"]);
                let gone = made.and_then(|id| member.ctl(&["rule", "del", &id]));
                gone.is_ok() && of_member.stdout().contains("rule_added")
            })?;
            let far = &net.b.host;
            let ends = member.connect(far, server(7000))?;
            let talk = Talk::over(&net.a.host, far, ends)?;
            let required = ["--dport", "7000", "--bump", "scramble", "--require"];
            let his = add(
                &member,
                "1000",
                &[&required[..], &["--priority", HIGHEST]].concat(),
            )?;
            net.wait_bump(7000, "scramble")?;
            talk.advance(2 << 20)?;

            let mut ears = net.eavesdrop()?;
            ears.from_now();
            let roots = [
                "rule",
                "add",
                "--dport",
                "7000",
                "--bump",
                "seal",
                "--require",
            ];
            let made = net.a.ctl(&roots)?;
            let roots = made["id"].to_string();
            ensure!(ids(&made["displaced"]) == [his.as_str()], "{made:#}");
            net.wait_bump(7000, "seal")?;
            talk.advance(2 << 20)?;
            ears.heard_nothing(&talk.plaintexts, 1 << 20)?;
            for events in [&of_root, &of_member] {
                let heard = wait_event(|| events.stdout(), "rule_displaced", &his)?;
                let told = heard.iter().find(|event| event["kind"] == "rule_displaced");
                let told = told.context("the event")?;
                ensure!(told["fields"]["by"] == roots.as_str(), "{told:#}");
                let text =
                    format!("rule {his} of uid 1000 contradicted one of root and was deleted");
                let said = told["text"].as_str().unwrap_or_default();
                ensure!(said.starts_with(&text), "{said}");
                ensure!(net.a.log().contains(said), "not in the log: {said}");
            }
            ensure!(
                member.ctl(&["rule", "list"])? == json!([]),
                "it is still there"
            );
            ensure!(!net.a.saved()?.contains(HIGHEST), "it is still saved");
            // The other way round nothing gives way.
            let again = [&["rule", "add", "--uid", "1000"], &required[..]].concat();
            let said = member.refused(&again)?;
            ensure!(said.contains(&format!("as rule {roots}")), "{said}");

            // And where nothing is required root's rules come first, too.
            let usual = [
                "--dport",
                "7001",
                "--bump",
                "scramble",
                "--priority",
                HIGHEST,
            ];
            add(&member, "1000", &usual)?;
            net.a
                .ctl(&["rule", "add", "--dport", "7001", "--bump", "seal"])?;
            let ends = member.connect(far, server(7001))?;
            let second = Talk::over(&net.a.host, far, ends)?;
            second.advance(256 << 10)?;
            net.wait_bump(7001, "seal")?;
            [talk, second].into_iter().try_for_each(Talk::finish)
        })
    });
}

#[test]
fn what_users_made_does_not_keep_a_daemon_from_starting_with_another_file() {
    isolated_with_users(|| {
        Setup::new().run(|net| {
            let member = net.a.member(1000)?;
            let required = ["--bump", "scramble", "--require"];
            let his = [&["--dport", "7000"], &required[..]].concat();
            let his = add(&member, "1000", &his)?;
            let roots = [&["rule", "add", "--dport", "7001"], &required[..]].concat();
            let roots = net.a.ctl(&roots)?["id"].to_string();
            let third = ["rule", "add", "--dport", "7002", "--bump", "scramble"];
            let third = net.a.ctl(&[&third[..], &["--require"]].concat())?["id"].to_string();

            net.a.configure_more(
                "\n[[rule]]\nbump = \"seal\"\ndport = [7000, 7001]\nrequire = true\n",
            )?;
            net.a.stop(Signal::SIGTERM)?;
            net.a.start()?;
            let said = |id: &str, uid: &str| {
                format!(
                    "rule {id} of uid {uid}, for \"scramble\", was deleted: it requires \
                     another bump of some of the same connections as rule 1, for \"seal\""
                )
            };
            for said in [said(&his, "1000"), said(&roots, "0")] {
                ensure!(net.a.log().contains(&said), "no {said:?}");
            }
            let rules = net.a.ctl(&["rule", "list"])?;
            ensure!(ids(&rules) == ["1", third.as_str()], "{rules:#}");

            // A file that excludes what is required.
            let file = net.a.directory().join("dibsd.toml");
            let config = std::fs::read_to_string(file)?;
            let config = config.replacen("[daemon]\n", "[daemon]\nfail = \"open\"\n", 1);
            net.a
                .configure(&config.replacen("require = true\n", "", 1))?;
            net.a.stop(Signal::SIGTERM)?;
            net.a.start()?;
            let said = format!(
                "rule {third} of uid 0, for \"scramble\", was deleted: require does not work with fail = \"open\""
            );
            ensure!(net.a.log().contains(&said), "no {said:?}");
            let rules = net.a.ctl(&["rule", "list"])?;
            ensure!(ids(&rules) == ["1"], "{rules:#}");
            ensure!(!net.a.saved()?.contains("\"require\": true"), "still saved");
            Ok(())
        })
    });
}

/// A state file as daemons wrote it that did not note who made a rule, with so many rules for a user.
fn rules_of(uid: u32, count: u64) -> String {
    let rule = |n: u64| {
        let selector = json!({ "match": { "uid": uid, "dport": 20_000 + n } });
        json!({ "id": 1000 + n, "rule": { "selector": selector, "bump": "seal" } })
    };
    let rules: Vec<Value> = (0..count).map(rule).collect();
    let saved = json!({
        "version": 1, "next_rule": 1000 + count, "rules": rules, "choices": [], "engaged": {},
    });
    saved.to_string()
}

#[test]
fn a_member_has_so_many_rules_and_others_can_make_theirs() {
    isolated_with_users(|| {
        Setup::new().without_daemons().run(|net| {
            std::fs::write(net.a.state_file(), rules_of(1000, 63))?;
            net.start()?;
            let (one, other) = (net.a.member(1000)?, net.a.member(1001)?);
            let last = add(&one, "1000", &["--dport", "80", "--bump", "seal"])?;
            ensure!(one.ctl(&["rule", "list"])?.as_array().map(Vec::len) == Some(64));
            let more = [
                "rule", "add", "--uid", "1000", "--dport", "81", "--bump", "seal",
            ];
            let said = one.refused(&more)?;
            ensure!(
                said.contains("uid 1000 has 64 rules, which is the limit: delete one first"),
                "{said}"
            );
            add(&other, "1001", &["--dport", "81", "--bump", "seal"])?;
            net.a.ctl(&more)?;
            one.ctl(&["rule", "del", &last])?;
            add(&one, "1000", &["--dport", "82", "--bump", "seal"])?;
            Ok(())
        })
    });
}

#[test]
fn loops_of_a_member_keep_neither_root_nor_others_out() {
    isolated_with_users(|| {
        Setup::new().run(|net| {
            let (one, other) = (net.a.member(1000)?, net.a.member(1001)?);
            let talk = net.talk(7000)?;
            let mut loops = Vec::new();
            let asked: [&[&str]; 4] = [
                &["status"],
                &["enable", "--all"],
                &[
                    "rule", "add", "--uid", "1000", "--dport", "80", "--bump", "seal",
                ],
                &["events"],
            ];
            for arguments in asked.iter().cycle().take(24) {
                loops.push(one.again_and_again(arguments)?);
            }
            // More clients than are served at once, so some are let go.
            let refused = |net: &Net, name: &str| {
                let status = net.a.ctl(&["status"]).unwrap_or_default();
                status["counters"][name]
                    .as_u64()
                    .is_some_and(|count| count > 0)
            };
            wait("clients to be refused", || refused(net, "clients_refused"))?;
            let said = "uid 1000 has 8 clients, which is the limit: close one";
            wait("clients to be told so", || {
                loops.iter().any(|asking| asking.stderr().contains(said))
            })?;
            net.a.enable(7000)?;
            net.a
                .ctl(&["rule", "add", "--dport", "81", "--bump", "seal"])?;
            add(&other, "1001", &["--dport", "81", "--bump", "seal"])?;
            net.a.ctl(&["cleanup"])?;
            for asking in loops {
                asking.kill();
            }
            talk.finish()
        })
    });
}
