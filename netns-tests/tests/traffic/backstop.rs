//! The daemon's own table of nftables: it holds what is required when all else is gone, however much that is; and
//! where the kernel refuses it, that is told, and nothing is promised that it would have to hold.

use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_netns::Process;
use netns_tests::daemon::wait;
use netns_tests::eavesdropper::is_tcp;
use netns_tests::topology::{server, server_v6};
use netns_tests::traffic::connect;
use netns_tests::{Net, Node, Setup, isolated, kernel};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

/// What `status` says of it.
fn backstop(node: &Node) -> Result<Value> {
    Ok(node.ctl(&["status"])?["backstop"].clone())
}

fn table_stands(node: &Node) -> bool {
    let tables = node.host.run("nft list tables");
    tables.is_ok_and(|tables| tables.contains("inet dibs"))
}

/// Has another program make the table and own it, until it is dropped.
fn taken(node: &Node) -> Result<Process> {
    let mut other = node.host.command("bash");
    let line = "exec nft -i < <(echo 'add table inet dibs { flags owner; }'; exec sleep 1000)";
    other.args(["-c", line]);
    let other = node.host.spawn(other)?;
    wait("the table of another program", || table_stands(node))?;
    Ok(other)
}

#[test]
fn many_required_ports_are_held_when_all_else_is_flushed() {
    isolated(|| {
        // The second is as many rules, of which the kernel is told at once.
        let single: Vec<String> = (0..200).map(|n| (9000 + 2 * n).to_string()).collect();
        let single = format!("[{}]", single.join(", "));
        let rule = |dport: &str| format!("bump = \"seal\"\ndport = {dport}\nrequire = true");
        Setup::new()
            .rule(&rule("\"8000-8199\""))
            .rule(&rule(&single))
            .run(|net| {
                ensure!(table_stands(&net.a), "{}", net.a.log());
                let standing = backstop(&net.a)?;
                ensure!(
                    standing == json!({"state": "lasting", "reason": null}),
                    "{standing}"
                );
                // Nothing is put back.
                net.a.suspend()?;
                let ears = net.eavesdrop()?;
                for line in [
                    "iptables -t mangle -F",
                    "ip6tables -t mangle -F",
                    "ip rule del priority 5200",
                    "ip -6 rule del priority 5200",
                ] {
                    net.a.host.run(line)?;
                }
                for port in [8000, 8099, 8199, 9000, 9398] {
                    for to in [server(port), server_v6(port)] {
                        // Its SYN is sent, or not, before this waits.
                        let begun = net.a.host.in_ns(|| {
                            TcpStream::connect_timeout(&to, Duration::from_millis(100)).map(drop)
                        });
                        ensure!(begun.is_err(), "connected to {to}");
                    }
                }
                let heard = ears.finish()?;
                for recording in [&heard.eth, &heard.wlan] {
                    let mut packets = recording.packets.iter();
                    ensure!(!packets.any(|packet| is_tcp(&packet.frame)), "in plain");
                }
                // And it is this that held them: what is not required goes.
                for port in [8200, 9001] {
                    for to in [server(port), server_v6(port)] {
                        connect(&net.a.host, &net.b.host, to)?;
                    }
                }
                net.a.go_on()
            })
    });
}

#[test]
fn a_table_that_the_kernel_refuses_is_told_until_it_stands() {
    isolated(|| {
        Setup::new().run(|net| {
            let events = net.a.events()?;
            wait("the bump to be retired", || !table_stands(&net.a))?;
            let told = |state: &str| {
                let lines = events.stdout();
                let of_this = |line: &&str| {
                    let event: Value = serde_json::from_str(line).unwrap_or_default();
                    event["kind"] == "backstop" && event["fields"]["state"] == state
                };
                lines.lines().filter(of_this).count()
            };
            let stood = told("lasting");
            let other = taken(&net.a)?;
            let talk = net.talk(7000)?;
            net.a.enable(7000)?;
            wait("the event", || told("failed") > 0)?;
            let standing = backstop(&net.a)?;
            ensure!(standing["state"] == "failed", "{standing}");
            let reason = standing["reason"].as_str().context("a reason")?;
            ensure!(reason.contains("does another program own it?"), "{reason}");

            for more in [&[][..], &["--require"]] {
                let rule = ["rule", "add", "--dport", "7001", "--bump", "seal"];
                let said = net.a.refused(&[&rule[..], more].concat())?;
                ensure!(said.contains("was not added"), "{said}");
                ensure!(said.trim_end().lines().count() == 1, "{said}");
            }
            ensure!(net.a.ctl(&["rule", "list"])? == json!([]));
            let state = kernel::state(&net.a.host)?;
            ensure!(
                !state.iter().any(|line| line.contains("7001")),
                "{state:#?}"
            );
            ensure!(!net.a.saved()?.contains("7001"), "{}", net.a.saved()?);
            // What is known is not said again.
            let errors = |node: &Node| node.log().matches("ERROR").count();
            ensure!(
                errors(&net.a) == 1 && told("failed") == 1,
                "{}",
                net.a.log()
            );

            drop(other);
            wait("the table", || {
                backstop(&net.a).is_ok_and(|standing| standing["state"] == "lasting")
            })?;
            wait("the event", || told("lasting") == stood + 1)?;
            net.a
                .ctl(&["rule", "add", "--dport", "7001", "--bump", "seal"])?;
            talk.finish()
        })
    });
}

#[test]
fn what_is_required_is_not_begun_without_it() {
    isolated(|| {
        let rule = "bump = \"seal\"\ndport = 7000\nrequire = true";
        Setup::new().rule(rule).without_daemons().run(|net| {
            let other = taken(&net.a)?;
            let before = kernel::state(&net.a.host)?;
            net.a.spawn()?;
            let said = net.a.refusal()?;
            let line = line_of(&net.a, "require")?;
            for part in [
                format!("dibsd.toml:{line}:"),
                "rule 1 does not survive a flush of the firewall".to_owned(),
                "does another program own it?".to_owned(),
            ] {
                ensure!(said.contains(&part), "no {part:?}: {said}");
            }
            let after = kernel::state(&net.a.host)?;
            let new: Vec<_> = after.iter().filter(|line| !before.contains(line)).collect();
            ensure!(new.iter().all(|line| !line.contains("DIBS")), "{new:#?}");
            drop(other);
            net.start()?;
            let standing = backstop(&net.a)?;
            ensure!(standing["state"] == "lasting", "{standing}");
            Ok(())
        })
    });
}

/// Where a key stands in the file.
fn line_of(node: &Node, key: &str) -> Result<usize> {
    let file = std::fs::read_to_string(node.directory().join("dibsd.toml"))?;
    let line = file.lines().position(|line| line.starts_with(key));
    Ok(line.context("the key")? + 1)
}

/// From now on IPv6 has no match for owners of sockets, until [`gains`].
fn lacks(node: &Node) -> Result<()> {
    node.host
        .shell(
            r#"mkdir /run/sbin; cp -a /usr/sbin/. /run/sbin
            program=$(readlink -f /usr/sbin/ip6tables-restore)
            rm /run/sbin/ip6tables-restore
            cat > /run/sbin/ip6tables-restore <<EOF
#!/bin/sh
input=\$(cat; echo .)
case "\$input" in *--uid-owner*) if [ -e /run/lacks ]; then
    echo "ip6tables-restore v1: Couldn't load match owner" >&2; exit 2
fi;; esac
printf %s "\${input%.}" | $program ip6tables-restore "\$@"
EOF
            chmod 755 /run/sbin/ip6tables-restore
            touch /run/lacks
            mount --bind /run/sbin /usr/sbin"#,
        )
        .map(drop)
}

fn gains(node: &Node) -> Result<()> {
    node.host.shell("rm /run/lacks").map(drop)
}

/// Has the daemon of `a` try its rules again, until IPv6 has one, and nothing is warned of.
fn tries_again(net: &Net) -> Result<()> {
    let pid = net.a.ctl(&["status"])?["pid"].to_string();
    net.a.host.run(&format!("kill -HUP {pid}"))?;
    wait("the rule in ip6tables", || {
        let saved = net.a.host.run("ip6tables-save -t mangle");
        saved.is_ok_and(|saved| saved.contains("--dport 700"))
    })?;
    wait("the warning to go", || warned(net).is_empty())
}

/// What `status` warns of, as far as it is about rules.
fn warned(net: &Net) -> Vec<String> {
    let status = net.a.ctl(&["status"]).unwrap_or_default();
    let warnings = status["warnings"].as_array().cloned().unwrap_or_default();
    let words = warnings.iter().filter_map(Value::as_str);
    let of_rules = words.filter(|warning| warning.starts_with("rule "));
    of_rules.map(str::to_owned).collect()
}

#[test]
fn a_rule_that_one_ip_version_lacks_is_told_and_taken_up_later() {
    isolated(|| {
        let rule = "bump = \"scramble\"\ndport = [7000, 7001]\nuid = 0";
        Setup::new().rule(rule).without_daemons().run(|net| {
            lacks(&net.a)?;
            net.start()?;
            let narrow =
                "rule 1 is in force for IPv4 only: ip6tables refuses it: Couldn't load match owner";
            ensure!(warned(net) == [narrow], "{:?}", warned(net));
            let conns = |to| connect(&net.a.host, &net.b.host, to);
            let _v4 = conns(server(7000))?;
            let _v6 = conns(server_v6(7001))?;
            net.a.wait_bump(7000, "scramble")?;
            ensure!(net.a.bumps(7001)? == ["plain"]);
            // What would be required is not had in part.
            let required = [
                "rule",
                "add",
                "--dport",
                "7002",
                "--uid",
                "0",
                "--bump",
                "seal",
                "--require",
            ];
            let said = net.a.refused(&required)?;
            let why = "it requires its bump for IPv6 too, but ip6tables refuses it: Couldn't load";
            ensure!(said.contains(why), "{said}");
            ensure!(said.trim_end().lines().count() == 1, "{said}");

            gains(&net.a)?;
            tries_again(net)?;
            net.a.wait_bump(7001, "scramble")?;
            net.a.ctl(&required).map(drop)
        })
    });
}

/// What was granted is not taken back where it can be kept.
#[test]
fn what_a_saved_rule_requires_is_kept_where_it_can_be_and_told() {
    isolated(|| {
        Setup::new().run(|net| {
            let made = net.a.ctl(&[
                "rule",
                "add",
                "--dport",
                "7000",
                "--uid",
                "0",
                "--bump",
                "seal",
                "--require",
            ])?;
            net.a.stop(Signal::SIGTERM)?;
            lacks(&net.a)?;
            net.a.start()?;
            net.wait_established()?;
            let narrow = format!(
                "rule {} requires its bump, but is in force for IPv4 only: ip6tables refuses it: Couldn't load match owner",
                made["id"]
            );
            ensure!(warned(net) == [narrow.as_str()], "{:?}", warned(net));
            let log = net.a.log();
            let mut errors = log.lines().filter(|line| line.contains("ERROR"));
            ensure!(errors.any(|line| line.contains(&narrow)), "{log}");
            let _v4 = connect(&net.a.host, &net.b.host, server(7000))?;
            net.a.wait_bump(7000, "seal")?;

            // It is saved as it was made, and taken up whole.
            gains(&net.a)?;
            tries_again(net)?;
            let ears = net.eavesdrop()?;
            let _v6 = connect(&net.a.host, &net.b.host, server_v6(7000))?;
            net.a.wait_bump(7000, "seal")?;
            let heard = ears.finish()?;
            for recording in [&heard.eth, &heard.wlan] {
                let mut packets = recording.packets.iter();
                ensure!(!packets.any(|packet| is_tcp(&packet.frame)), "in plain");
            }
            ensure!(net.a.saved()?.contains("\"require\": true"), "not saved");
            Ok(())
        })
    });
}

/// A daemon that does not start would block no less, and carry nothing.
#[test]
fn what_one_ip_version_does_not_take_is_required_of_all_until_it_does() {
    isolated(|| {
        let rule = "bump = \"seal\"\ndport = [7000, 7001]\nuid = 0\nrequire = true";
        Setup::new().rule(rule).without_daemons().run(|net| {
            lacks(&net.a)?;
            net.start()?;
            let warnings = warned(net);
            let [warning] = &warnings[..] else {
                anyhow::bail!("{warnings:?}");
            };
            for part in [
                "rule 1 requires its bump for every user's connections",
                "it requires its bump for IPv6 too, but ip6tables refuses it: Couldn't load",
            ] {
                ensure!(warning.contains(part), "no {part:?}: {warning}");
            }
            let place = format!("dibsd.toml:{}:", line_of(&net.a, "uid")?);
            ensure!(net.a.log().contains(&place), "{}", net.a.log());
            let ears = net.eavesdrop()?;
            let conns = |to| connect(&net.a.host, &net.b.host, to);
            let _v4 = conns(server(7000))?;
            let _v6 = conns(server_v6(7001))?;
            net.a.wait_bump(7000, "seal")?;
            net.a.wait_bump(7001, "seal")?;
            let heard = ears.finish()?;
            for recording in [&heard.eth, &heard.wlan] {
                let mut packets = recording.packets.iter();
                ensure!(!packets.any(|packet| is_tcp(&packet.frame)), "in plain");
            }
            gains(&net.a)?;
            wait("the rule to hold as it is", || {
                let saved = net.a.host.run("ip6tables-save -t mangle");
                saved.is_ok_and(|saved| saved.contains("--uid-owner 0"))
            })?;
            wait("the warning to go", || warned(net).is_empty())?;
            ensure!(net.a.bumps(7001)? == ["seal"]);
            Ok(())
        })
    });
}
