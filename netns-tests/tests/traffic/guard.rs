//! A guard, and a daemon, to which something of the configuration is not known: what a rule requires does not leave in
//! plain meanwhile.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use dibs_netns::HANG;
use netns_tests::daemon::wait;
use netns_tests::{Net, Setup, isolated, kernel};
use nix::sys::signal::Signal;

use super::start::{IN_VAIN, connects, guard};

/// Uid of the user who comes later.
const LATE: u32 = 4711;

/// Rule for a user who is not known to the host at first.
fn of_late_user(level: &str) -> String {
    format!("bump = \"seal\"\ndport = 7000\nuser = \"late\"\n{level}")
}

/// Gives host `a` a list of users of its own, in which `late` is or is not.
fn users(net: &Net, late: bool) -> Result<()> {
    let own = net.a.directory().join("passwd");
    let mut users = fs::read_to_string("/etc/passwd")?;
    if late {
        users += &format!("late:x:{LATE}:{LATE}::/:/bin/false\n");
    }
    let is_new = !own.exists();
    fs::write(&own, users)?;
    if is_new {
        net.a
            .host
            .run("mount --bind /run/dibs/passwd /etc/passwd")?;
    }
    Ok(())
}

/// Ports of `b` of those given that `a` cannot reach.
fn blocked(net: &Net, ports: &[u16]) -> Result<Vec<u16>> {
    let mut blocked = Vec::new();
    for &port in ports {
        if !connects(net, port, IN_VAIN)? {
            blocked.push(port);
        }
    }
    Ok(blocked)
}

/// Warnings of `status` of `a` about rules.
fn warned(net: &Net) -> Result<Vec<String>> {
    let status = net.a.ctl(&["status"])?;
    let warnings = status["warnings"].as_array().context("warnings")?;
    let warnings = warnings.iter().filter_map(|warning| warning.as_str());
    let of_rules = warnings.filter(|warning| warning.starts_with("rule "));
    Ok(of_rules.map(str::to_owned).collect())
}

/// Leaves of a daemon that ran on `a` what a new start of the host leaves.
fn reboot(net: &mut Net) -> Result<()> {
    net.a.stop(Signal::SIGTERM)?;
    net.a.ctl(&["cleanup"])?;
    for file in fs::read_dir(net.a.directory())? {
        let file = file?;
        if file.file_name().to_string_lossy().starts_with("dibsd.s") {
            fs::remove_file(file.path())?;
        }
    }
    Ok(())
}

#[test]
fn the_guard_blocks_all_ports_of_a_rule_whose_user_is_not_known() {
    isolated(|| {
        let usual = "bump = \"seal\"\ndport = 7001\nuser = \"late\"";
        let prefers = "bump = \"seal\"\ndport = 7002\nuser = \"late\"\nprefer = true";
        let other = "bump = \"scramble\"\ndport = 7003";
        let setup = Setup::new()
            .rule(&of_late_user("require = true"))
            .rule(usual);
        setup
            .rule(prefers)
            .rule(other)
            .without_daemons()
            .run(|net| {
                let before = kernel::state(&net.a.host)?;
                guard(net)?;
                let blocked = blocked(net, &[7000, 7001, 7003])?;
                ensure!(blocked == [7000, 7001, 7003], "{blocked:?}");
                for port in [7002, 7004] {
                    ensure!(connects(net, port, HANG)?, "{port} was blocked");
                }
                net.a.ctl(&["cleanup"])?;
                let after = kernel::state(&net.a.host)?;
                ensure!(before == after, "{before:#?} became {after:#?}");
                Ok(())
            })
    });
}

#[test]
fn the_guard_blocks_all_ports_of_a_rule_that_iptables_refuses() {
    isolated(|| {
        let refused = "bump = \"seal\"\ndport = 7000\nmatch = \"-m set --match-set nowhere dst\"";
        let other = "bump = \"seal\"\ndport = 7001\nrequire = true";
        let setup = Setup::new().rule(refused).rule(other);
        setup.without_daemons().run(|net| {
            guard(net)?;
            let blocked = blocked(net, &[7000, 7001])?;
            ensure!(blocked == [7000, 7001], "{blocked:?}");
            ensure!(connects(net, 7002, HANG)?, "7002 was blocked");
            Ok(())
        })
    });
}

#[test]
fn the_guard_that_cannot_read_the_file_blocks_what_was_carried_out_last() {
    isolated(|| {
        let usual =
            "bump = \"scramble\"\ndport = [7001, 7002]\ndestination = \"10.0.1.2/32\"\nuid = 0";
        let required = "bump = \"seal\"\ndport = 7000\nrequire = true";
        Setup::new().rule(required).rule(usual).run(|net| {
            let kept = net.a.directory().join("lib/wishes.json");
            wait("the wishes to be kept", || kept.exists())?;
            let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&kept)?.permissions());
            ensure!(mode & 0o777 == 0o600, "{mode:o}");
            // Beside a daemon it has nothing to do.
            guard(net)?;
            reboot(net)?;
            ensure!(connects(net, 7000, HANG)?, "it is blocked without a guard");
            let file = net.a.directory().join("dibsd.toml");
            let text = fs::read_to_string(&file)?;
            for broken in [
                // One wrong word, and no TOML at all.
                text.replacen("require = true", "require = \"yes\"", 1),
                text.replacen("[[peer]]", "[[peer", 1),
            ] {
                fs::write(&file, &broken)?;
                guard(net)?;
                let blocked = blocked(net, &[7000, 7001, 7002])?;
                ensure!(blocked == [7000, 7001, 7002], "{blocked:?}: {broken}");
                ensure!(connects(net, 7003, HANG)?, "7003 was blocked");
                net.a.ctl(&["cleanup"])?;
            }
            Ok(())
        })
    });
}

#[test]
fn what_is_required_of_a_user_to_come_is_required_of_all_until_the_user_is_known() {
    isolated(|| {
        let setup = Setup::new().rule(&of_late_user("require = true"));
        setup.without_daemons().run(|net| {
            users(net, false)?;
            guard(net)?;
            net.a.start()?;
            // Without a session, and without the user, nothing of the rule's ports leaves.
            let blocked = blocked(net, &[7000])?;
            ensure!(blocked == [7000], "{blocked:?}");
            ensure!(connects(net, 7001, HANG)?, "7001 was blocked");
            let warnings = warned(net)?;
            let expected = "rule 1 requires its bump for every user's connections to its ports and addresses, because its \
                            user is not known yet: there is no user \"late\"";
            ensure!(warnings == [expected], "{warnings:?}");
            net.b.start()?;
            net.wait_established()?;
            let ears = net.eavesdrop()?;
            let talk = net.talk(7000)?;
            net.wait_bump(7000, "seal")?;
            talk.advance(256 << 10)?;
            let heard = ears.finish()?;
            ensure!(heard.segments(7000) == [0, 0], "in plain: {:?}", heard.segments(7000));

            users(net, true)?;
            wait("the user to be known", || warned(net).is_ok_and(|now| now.is_empty()))?;
            // It was root's.
            net.wait_bump(7000, "plain")?;
            talk.advance(256 << 10)?;
            let saved = net.a.host.run("iptables-save -t mangle")?;
            ensure!(saved.contains(&format!("--uid-owner {LATE}")), "{saved}");
            talk.finish()
        })
    });
}

#[test]
fn a_usual_rule_waits_for_its_user_and_says_so() {
    isolated(|| {
        Setup::new()
            .without_daemons()
            .rule(&of_late_user(""))
            .run(|net| {
                users(net, false)?;
                net.start()?;
                let talk = net.talk(7000)?;
                talk.advance(256 << 10)?;
                ensure!(net.a.bumps(7000)? == ["plain"]);
                let warnings = warned(net)?;
                let expected =
                    "rule 1 is not in force, because its user is not known yet: there is no user \"late\"";
                ensure!(warnings == [expected], "{warnings:?}");
                let rules = net.a.ctl(&["rule", "list"])?;
                ensure!(rules[0]["active"] == false, "{rules}");
                // A reload waits as well; once the user is there the rule holds.
                net.a.reload()?;
                wait("the reload", || {
                    net.a.log().contains("1 rule(s) of the configuration file are in force")
                })?;
                users(net, true)?;
                wait("the rule to hold", || {
                    let rules = net.a.ctl(&["rule", "list"]).unwrap_or_default();
                    rules[0]["active"] == true
                })?;
                ensure!(warned(net)?.is_empty(), "{:?}", warned(net)?);
                wait("the rule to be in the kernel", || {
                    let saved = net.a.host.run("iptables-save -t mangle");
                    saved.is_ok_and(|saved| saved.contains(&format!("--uid-owner {LATE}")))
                })?;
                talk.advance(256 << 10)?;
                talk.finish()
            })
    });
}

#[test]
fn a_reload_of_a_broken_file_leaves_suspended_rules_suspended() {
    isolated(|| {
        Setup::new()
            .rule("bump = \"seal\"\ndport = 7000")
            .run(|net| {
                let file = net.a.directory().join("dibsd.toml");
                let text = fs::read_to_string(&file)?;
                net.a.ctl(&["cleanup"])?;
                fs::write(&file, text.replacen("dport", "dprt", 1))?;
                net.a.reload()?;
                wait("the refusal", || {
                    net.a
                        .log()
                        .contains("the configuration file was not applied")
                })?;
                wait("the end of the reload", || {
                    net.a.log().contains("steering applied again")
                })?;
                let rules = net.a.ctl(&["rule", "list"])?;
                ensure!(rules.as_array().is_some_and(Vec::is_empty), "{rules}");
                let saved = net.a.host.run("iptables-save -t mangle")?;
                ensure!(!saved.contains("DIBS"), "{saved}");
                let talk = net.talk(7000)?;
                talk.advance(256 << 10)?;
                ensure!(net.a.bumps(7000)? == ["plain"]);
                // One that is right has them hold again.
                fs::write(&file, &text)?;
                net.a.reload()?;
                net.wait_bump(7000, "seal")?;
                talk.advance(256 << 10)?;
                talk.finish()
            })
    });
}
