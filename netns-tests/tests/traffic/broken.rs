//! Hosts that lack something, or whose administrator is not kind: connections go on, or it is said clearly why
//! not, and nothing of them is in plain.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use dibs_netns::{Host, Process};
use netns_tests::daemon::{SOON, wait};
use netns_tests::traffic::SETTLED;
use netns_tests::{Net, Node, Setup, isolated, kernel, programs};
use nix::sys::signal::Signal;
use serde_json::json;

/// From now on the host has none of these programs, given as a pattern of the shell.
fn uninstall(host: &Host, programs: &str) -> Result<()> {
    host.shell(&format!(
        "mkdir /run/sbin; cp -a /usr/sbin/. /run/sbin; cd /run/sbin; rm -f {programs}
             mount --bind /run/sbin /usr/sbin"
    ))
    .map(drop)
}

/// From now on iptables-restore of the host waits before it installs what marks connections; the last line
/// of what this returns lets it go on.
fn hold_marking(host: &Host) -> Result<&'static str> {
    uninstall(host, "iptables-restore")?;
    host.shell(
        "mkfifo /run/gate; cat > /run/sbin/iptables-restore <<'END'
#!/bin/sh
input=$(cat)
case $input in *DIBS-INPUT*) if [ -e /run/gate ]; then : > /run/asked; cat /run/gate; fi;; esac
printf '%s\\n' \"$input\" | exec iptables-nft-restore \"$@\"
END
        chmod +x /run/sbin/iptables-restore",
    )?;
    Ok("mv /run/gate /run/open && : > /run/open")
}

fn log_has(node: &Node, words: &str) -> usize {
    node.log().matches(words).count()
}

#[test]
fn without_ipv6_what_is_ipv4_goes_in_and_out() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            for node in [&net.a, &net.b] {
                for which in ["all", "default"] {
                    let key = format!("net.ipv6.conf.{which}.disable_ipv6");
                    node.host.sysctl(&key, "1")?;
                }
            }
            net.start()?;
            let talk = net.bumped()?;
            net.a.disable(7000)?;
            net.wait_bump(7000, "plain")?;
            talk.advance(64 << 10)?;
            talk.finish()
        })
    });
}

#[test]
fn ipv6_is_disabled_under_a_connection() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            let ears = net.eavesdrop()?;
            let key = "net.ipv6.conf.all.disable_ipv6";
            net.a.host.sysctl(key, "1")?;
            // What is amiss with IPv6 is in nobody's way.
            net.a.host.shell("iptables -t mangle -F")?;
            wait("the chains to be put back", || {
                let saved = net.a.host.run("iptables-save -t mangle");
                saved.is_ok_and(|saved| saved.contains("-A DIBS-OUTPUT"))
            })?;
            talk.advance(SETTLED)?;
            net.a.host.sysctl(key, "0")?;
            talk.advance(SETTLED)?;
            // That others change what was just written may be said.
            let log = net.a.log();
            let mut errors = log.lines().filter(|line| line.contains("ERROR"));
            let of_ipv6 = |line: &str| {
                ["IPv6", "ip6", "inet6"]
                    .iter()
                    .any(|name| line.contains(name))
            };
            ensure!(!errors.any(of_ipv6), "{log}");
            ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
            talk.finish()
        })
    });
}

#[test]
fn without_iptables_nothing_is_changed() {
    isolated(|| {
        Setup::new().run(|net| {
            uninstall(&net.a.host, "ip*tables* xtables*")?;
            let talk = net.talk(7000)?;
            let said = net.a.refused(&["enable", "--dport", "7000"])?;
            let expected = "iptables-restore is not installed (looked in /usr/sbin, /sbin, /usr/bin, /bin); \
                            install the package iptables";
            ensure!(said.contains(expected), "{said}");
            ensure!(said.matches("looked in").count() == 1, "{said}");
            wait("the TUN to go", || net.a.host.run("ip link show dibs1").is_err())?;
            ensure!(net.a.bumps(7000)? == ["plain"]);
            talk.advance(64 << 10)?;
            talk.finish()
        })
    });
}

/// Holds the lock of iptables on `a`, until it is dropped.
fn hold_lock(net: &Net) -> Result<Process> {
    let mut holder = net.a.host.command("flock");
    let hold = [
        "--close",
        "/run/xtables.lock",
        "sh",
        "-c",
        "echo held; exec sleep 100",
    ];
    holder.args(hold);
    let holder = net.a.host.spawn(holder)?;
    wait("the lock", || holder.stdout().contains("held"))?;
    Ok(holder)
}

#[test]
fn a_host_that_takes_its_time_to_steer_answers_nothing_in_plain() {
    isolated(|| {
        let rule = "bump = \"seal\"\ndport = 7000\nrequire = true";
        Setup::new().rule(rule).without_daemons().run(|net| {
            let ears = net.eavesdrop()?;
            let go_on = hold_marking(&net.b.host)?;
            net.start()?;
            wait("iptables to be asked", || {
                net.b.host.shell("[ -e /run/asked ]").is_ok()
            })?;
            let talk = std::thread::scope(|scope| {
                let talk = scope.spawn(|| net.talk(7000));
                // What came by the TUN before was not answered by it, so it comes again.
                let resent = || kernel::counted(&net.a.host, "TCPSynRetrans");
                let resent = wait("a SYN sent again", || resent().is_ok_and(|n| n > 0));
                net.b.host.shell(go_on)?;
                let talk = talk.join().expect("no panic")?;
                resent.map(|()| talk)
            })?;
            talk.advance(SETTLED)?;
            talk.finish()?;
            ears.finish()?.no_segment(7000)
        })
    });
}

#[test]
fn while_another_program_holds_the_lock_of_iptables() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            // Of the two kinds the legacy one has a lock.
            uninstall(
                &net.a.host,
                "ip*tables ip*tables-restore ip*tables-save ip*tables-nft*",
            )?;
            net.start()?;
            let talk = net.bumped()?;
            net.wait_locked(7000)?;
            let ears = net.eavesdrop()?;
            let other = net.talk(7001)?;
            let lock = hold_lock(net)?;
            let asked = || log_has(&net.a, "iptables-restore --noflush");
            let before = asked();
            let mut enable = net.a.host.command(programs::built("dibsctl"));
            enable.args(["enable", "--dport", "7001", "--bump", "seal"]);
            let mut enable = net.a.host.spawn(enable)?;
            wait("iptables to be waited for", || asked() > before)?;
            // What cannot be said is left out, once what was read before is too old.
            wait("status to say what is not known", || {
                let status = net.a.ctl(&["status"]);
                status.is_ok_and(|status| {
                    let warnings = status["warnings"].to_string();
                    warnings.contains("what iptables dropped is not known")
                })
            })?;
            ensure!(!enable.wait(SOON)?.success(), "{}", enable.stdout());
            let said = enable.stderr();
            ensure!(said.contains("/run/xtables.lock"), "{said}");
            talk.advance(SETTLED)?;
            other.advance(64 << 10)?;
            ensure!(net.a.bumps(7001)? == ["plain"]);
            drop(lock);
            net.a.put_on("seal", "--dport", 7001)?;
            net.wait_bump(7001, "seal")?;
            talk.advance(SETTLED)?;
            ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
            talk.finish()?;
            other.finish()
        })
    });
}

#[test]
fn the_tun_gets_another_name() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            let ears = net.eavesdrop()?;
            net.a.host.run("ip link set dibs1 name other0")?;
            wait("the TUN to be back", || {
                net.a
                    .host
                    .run("ip link show dibs1 up")
                    .is_ok_and(|said| said.contains("dibs1"))
            })?;
            ensure!(net.a.host.run("ip link show other0").is_err(), "two TUNs");
            talk.advance(SETTLED)?;
            ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
            talk.finish()
        })
    });
}

/// What an error of the system says, it says once.
#[test]
fn the_name_of_the_tun_is_taken() {
    isolated(|| {
        Setup::new().run(|net| {
            net.a
                .host
                .run("ip link add dibs1 type veth peer name other0")?;
            let talk = net.talk(7000)?;
            let said = net.a.refused(&["enable", "--dport", "7000"])?;
            ensure!(
                said.contains("dibs1") && said.matches("os error").count() == 1,
                "{said}"
            );
            ensure!(net.a.bumps(7000)? == ["plain"]);
            let saved = net.a.saved()?;
            ensure!(!saved.contains("7000"), "{saved}");
            let rule = ["rule", "add", "--dport", "7000", "--bump", "scramble"];
            let said = net.a.refused(&rule)?;
            ensure!(said.contains("dibs1"), "{said}");
            net.a.host.run("ip link del dibs1")?;
            // Nor does what was refused come into force later.
            net.a.stop(Signal::SIGKILL)?;
            net.a.start()?;
            net.wait_established()?;
            talk.advance(SETTLED)?;
            ensure!(net.a.ctl(&["rule", "list"])? == json!([]), "a rule stands");
            ensure!(net.a.bumps(7000)? == ["plain"]);
            net.a.enable(7000)?;
            net.wait_bump(7000, "scramble")?;
            talk.finish()
        })
    });
}

#[test]
fn paths_over_link_local_addresses() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let link_local = |node: &Node| -> Result<String> {
                let listed = node.host.run("ip -6 -o address show dev eth0 scope link")?;
                let address = listed.split_ascii_whitespace().nth(3);
                let address = address.and_then(|word| word.split('/').next());
                Ok(address.context("a link-local address")?.to_owned())
            };
            for (node, peer) in [(&net.a, &net.b), (&net.b, &net.a)] {
                let config = std::fs::read_to_string(node.directory().join("dibsd.toml"))?;
                let endpoint = |line: &str| match line.starts_with("eth = ") {
                    true => link_local(peer).map(|to| format!("eth = \"[{to}]:5300\"")),
                    false => Ok(line.to_owned()),
                };
                let lines: Result<Vec<_>> = config.lines().map(endpoint).collect();
                node.configure(&lines?.join("\n"))?;
            }
            net.start()?;
            for node in [&net.a, &net.b] {
                let paths = node.ctl(&["path", "list"])?;
                ensure!(
                    paths.as_array().is_some_and(|list| list.len() == 2),
                    "{paths:#}"
                );
            }
            let talk = net.bumped()?;
            talk.finish()
        })
    });
}

/// The number of the daemon's process.
fn pid(node: &Node) -> Result<u64> {
    let status = node.ctl(&["status"])?;
    status["pid"].as_u64().context("no pid")
}

#[test]
fn a_daemon_runs_out_of_descriptors_and_gets_some_back() {
    isolated(|| {
        Setup::new().run(|net| {
            let talk = net.bumped()?;
            net.wait_locked(7000)?;
            let ears = net.eavesdrop()?;
            let pid = pid(&net.a)?;
            let open = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count();
            let limit = |soft: usize| {
                let set = format!("prlimit --pid {pid} --nofile={soft}:");
                net.a.host.run(&set)
            };
            limit(open)?;
            // What the daemon runs just now may count as open: as many clients as it takes.
            let mut clients = Vec::new();
            wait("a client that has to wait", || {
                let mut client = net.a.host.command(programs::built("dibsctl"));
                client.arg("events");
                let client = net.a.host.spawn(client);
                clients.push(client.expect("a client is started"));
                log_has(&net.a, "cannot accept clients") > 0
            })?;
            net.a.host.run("ip rule del priority 5200")?;
            talk.stands_still(Duration::from_secs(3))?;
            let troubles = || {
                let log = net.a.log();
                let bad = |line: &&str| line.contains("WARN") || line.contains("ERROR");
                log.lines().filter(bad).map(str::to_owned).collect()
            };
            let told: Vec<String> = troubles();
            talk.stands_still(Duration::from_secs(5))?;
            ensure!(
                troubles() == told,
                "what is known is said again: {}",
                net.a.log()
            );
            limit(1024)?;
            talk.advance(SETTLED)?;
            ensure!(net.a.ctl(&["status"]).is_ok());
            ears.heard_nothing(&talk.plaintexts, SETTLED as usize)?;
            talk.finish()
        })
    });
}

#[test]
fn too_few_descriptors_to_start() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let dibsd = programs::built("dibsd");
            for limit in [6, 7, 12, 20, 30] {
                let mut start = net.a.host.command("sh");
                let line = format!(
                    "ulimit -n {limit}; exec {} --config /run/dibs/dibsd.toml",
                    dibsd.display()
                );
                start.args(["-c", &line]);
                let mut start = net.a.host.spawn(start)?;
                ensure!(start.wait(SOON)?.code() == Some(1), "{}", start.stderr());
                let said = start.stderr();
                ensure!(
                    said.contains("raise the limit") && !said.contains("panicked"),
                    "{said}"
                );
            }
            Ok(())
        })
    });
}

/// Any user may take the port while the daemon is away.
#[test]
fn a_path_waits_for_its_port_and_names_who_has_it() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            let mut other = net.a.host.command("socat");
            other.args(["-u", "UDP4-RECV:5300,bind=10.0.1.1", "STDOUT"]);
            let other = net.a.host.spawn(other)?;
            wait("the port to be taken", || {
                let said = net.a.host.run("ss -Hlun");
                said.is_ok_and(|said| said.contains(":5300"))
            })?;
            let holder = format!("socat (pid {})", other.id());
            let said = net.a.diagnosis("port")?;
            ensure!(said.contains(&holder), "{said}");
            net.b.start()?;
            net.a.start()?;
            net.a.wait_path("eth", "down")?;
            let reason = net.a.path("eth")?["reason"].to_string();
            ensure!(reason.contains(&holder), "{reason}");
            ensure!(net.a.log().contains(&holder), "{}", net.a.log());
            let said = net.a.diagnosis("udp")?;
            ensure!(said.contains(&holder), "{said}");
            drop(other);
            net.wait_established()
        })
    });
}

/// The daemon has given up what it does not need by then, also when an interface comes later.
#[test]
fn ports_that_take_a_capability() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            for node in [&net.a, &net.b] {
                let config = std::fs::read_to_string(node.directory().join("dibsd.toml"))?;
                let config = config.replace(":5300\"", ":443\"");
                node.configure(&config.replacen("[daemon]", "[daemon]\nport = 443", 1))?;
            }
            net.a.host.run("ip link set wlan0 name later")?;
            net.b.start()?;
            net.a.start()?;
            net.a.wait_path("eth", "up")?;
            net.a.host.run("ip link set later name wlan0")?;
            net.a.host.run("ip link set wlan0 up")?;
            net.wait_established()?;
            net.bumped()?.finish()
        })
    });
}

/// Whoever reads the log ends, or has no room for it.
#[test]
fn nobody_reads_the_log() {
    isolated(|| {
        Setup::new().without_daemons().run(|net| {
            net.b.start()?;
            let dibsd = format!(
                "{} --config /run/dibs/dibsd.toml",
                programs::built("dibsd").display()
            );
            for (line, ready) in [("2>&1 | head -n 1", 1), ("2>/dev/full; true", 2)] {
                let mut start = net.a.host.command("sh");
                start.args(["-c", &format!("{dibsd} {line}")]);
                let mut start = net.a.host.spawn(start)?;
                net.wait_established()?;
                // Each is logged.
                for port in 1..=20 {
                    let port = (ready * 100 + port).to_string();
                    net.a
                        .ctl(&["rule", "add", "--dport", &port, "--bump", "scramble"])?;
                }
                let talk = net.talk(7000 + ready)?;
                net.a.enable(7000 + ready)?;
                talk.advance(64 << 10)?;
                talk.finish()?;
                let end = format!("kill {}", pid(&net.a)?);
                net.a.host.run(&end)?;
                start.wait(SOON)?;
            }
            Ok(())
        })
    });
}
