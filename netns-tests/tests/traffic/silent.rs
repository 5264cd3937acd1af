//! A service behind a firewall that lets it be reached by an interface, and not by a bump: both ends say so.

use std::io::ErrorKind;
use std::net::TcpListener;

use anyhow::{Context as _, Result, ensure};
use netns_tests::daemon::wait;
use netns_tests::topology::server;
use netns_tests::{Net, Node, Setup, isolated};
use serde_json::Value;
use socket2::{Domain, Socket, Type};

use crate::doctor::examined;

const PORT: u16 = 7000;

/// `a` calls a port of `b`, and does not wait for an answer.
fn call(net: &Net, port: u16) -> Result<Socket> {
    net.a.host.in_ns(|| -> Result<Socket> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        match socket.connect(&server(port).into()) {
            Err(error) if error.raw_os_error() != Some(nix::libc::EINPROGRESS) => Err(error.into()),
            _ => Ok(socket),
        }
    })
}

fn listen(net: &Net, port: u16) -> Result<TcpListener> {
    let listener = net.b.host.in_ns(|| TcpListener::bind(server(port)))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The ports of a node's status of this host, or of the peer's, that do not answer.
fn silent(node: &Node, here: bool) -> Result<Vec<Value>> {
    let status = node.ctl(&["status"])?;
    let ports = status["silent_ports"]
        .as_array()
        .context("no ports")?
        .clone();
    Ok(ports
        .into_iter()
        .filter(|port| port["here"] == here)
        .collect())
}

fn is_told(node: &Node, words: &[&str]) -> bool {
    let told = || -> Result<bool> {
        let status = node.ctl(&["status"])?;
        let mut warnings = status["warnings"].as_array().context("no warnings")?.iter();
        Ok(warnings.any(|said| {
            let said = said.as_str().unwrap_or_default();
            words.iter().all(|word| said.contains(word))
        }))
    };
    told().unwrap_or(false)
}

/// A firewall of `b`: what makes it, what lets in what comes by bumps, and the rule that `doctor` is to name.
struct Firewall {
    made: &'static str,
    opened: &'static str,
    named: &'static str,
    /// The firewall says that it rejects, so programs give up at once.
    rejects: bool,
}

const IPTABLES: Firewall = Firewall {
    made: "iptables -A INPUT -i lo -j ACCEPT; iptables -A INPUT -i eth0 -j ACCEPT; \
           iptables -A INPUT -i wlan0 -j ACCEPT; \
           iptables -A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT; iptables -P INPUT DROP",
    opened: "iptables -A INPUT -i dibs+ -j ACCEPT",
    named: "the policy of INPUT",
    rejects: false,
};

/// The rules of firewalld, shortened, with a zone of two interfaces in which the port is open.
const FIREWALLD: Firewall = Firewall {
    made: "nft -f - <<'END'
table inet firewalld {
    chain filter_INPUT {
        type filter hook input priority filter + 10; policy accept;
        ct state { established, related } accept
        ct status dnat accept
        iifname lo accept
        ct state invalid drop
        jump filter_INPUT_ZONES
        reject with icmpx admin-prohibited
    }
    chain filter_INPUT_ZONES {
        iifname eth0 goto filter_IN_public
        iifname wlan0 goto filter_IN_public
    }
    chain filter_IN_public {
        meta l4proto { icmp, ipv6-icmp } accept
        udp dport 5300 accept
        tcp dport 7000 accept
    }
}
END",
    opened: "nft insert rule inet firewalld filter_INPUT iifname 'dibs*' accept",
    named: "chain filter_INPUT in table inet firewalld",
    rejects: true,
};

fn closed_and_opened(bump: &str, device: &str, firewall: &Firewall) -> Result<()> {
    let rule = format!("bump = \"{bump}\"\ndport = {PORT}");
    Setup::new().rule(&rule).run(|net| {
        let [of_a, of_b] = [net.a.events()?, net.b.events()?];
        net.b.host.shell(firewall.made)?;
        let listener = listen(net, PORT)?;
        let calling = call(net, PORT)?;
        wait("b to say that it does not answer", || {
            is_told(
                &net.b,
                &["port 7000", "does not answer", bump, device, "doctor"],
            )
        })?;
        wait("a to say so too", || {
            is_told(
                &net.a,
                &["port 7000 of server", "no answer", "firewall", device],
            )
        })?;
        let here = silent(&net.b, true)?;
        ensure!(here.len() == 1, "{here:?}");
        ensure!(here[0]["connections"].as_u64() >= Some(1), "{here:?}");
        ensure!(
            here[0]["device"] == device && here[0]["port"] == PORT,
            "{here:?}"
        );
        ensure!(silent(&net.a, true)?.is_empty() && silent(&net.b, false)?.is_empty());
        ensure!(net.b.counter("connection_unanswered")? >= 1);
        ensure!(net.b.log().contains("does not answer connections of peer"));
        ensure!(net.a.log().contains("get no answer"));
        if !firewall.rejects {
            let conns = net.a.ctl(&["conn", "list"])?;
            let reason = conns[0]["reason"].as_str().unwrap_or_default();
            ensure!(reason.contains("firewall on server"), "{conns:#}");
        }
        let add = |port| {
            net.a.ctl(&[
                "rule", "add", "--dport", port, "--sport", "9", "--bump", bump,
            ])
        };
        let added = add("7000")?;
        let said = added["warnings"][0].as_str().unwrap_or_default();
        ensure!(said.contains("port 7000 of server"), "{added:#}");
        ensure!(
            add("7001")?.get("warnings").is_none(),
            "another port answers"
        );
        let (examined_b, _) = examined(&net.b)?;
        let mut checks = examined_b["checks"].as_array().into_iter().flatten();
        let named =
            checks.find(|check| check["check"] == "firewall" && check["result"] == "failed");
        let named = named.with_context(|| format!("{examined_b:#}"))?;
        let found = named["found"].as_str().unwrap_or_default();
        for part in ["port 7000", device, firewall.named] {
            ensure!(found.contains(part), "{part}: {named:#}");
        }

        drop(calling);
        net.b.host.shell(firewall.opened)?;
        let _calling = call(net, PORT)?;
        wait("the connection to come about", || listener.accept().is_ok())?;
        wait("both to know", || {
            let none = |node, here| silent(node, here).is_ok_and(|ports| ports.is_empty());
            none(&net.b, true) && none(&net.a, false)
        })?;
        for (events, kinds) in [
            (of_b, ["\"port_silent\"", "\"port_answers\""]),
            (of_a, ["\"peer_port_silent\"", "\"peer_port_answers\""]),
        ] {
            wait("the events", || {
                kinds.iter().all(|kind| events.stdout().contains(kind))
            })?;
        }
        Ok(())
    })
}

#[test]
fn a_closed_iptables_is_told_at_both_ends_for_seal() {
    isolated(|| closed_and_opened("seal", "dibs3", &IPTABLES));
}

#[test]
fn a_closed_iptables_is_told_at_both_ends_for_scramble() {
    isolated(|| closed_and_opened("scramble", "dibs1", &IPTABLES));
}

#[test]
fn a_rejecting_firewalld_is_told_at_both_ends() {
    isolated(|| closed_and_opened("seal", "dibs3", &FIREWALLD));
}

/// A kernel drops calls to a program that does not take them; that is no firewall's doing.
#[test]
fn a_program_that_takes_no_connections_is_no_firewall() {
    isolated(|| {
        Setup::new()
            .rule("bump = \"seal\"\ndport = \"7000-7001\"")
            .run(|net| {
                let _full = net.b.host.in_ns(|| -> Result<Socket> {
                    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
                    socket.bind(&server(7000).into())?;
                    socket.listen(1)?;
                    Ok(socket)
                })?;
                let mut calls = Vec::new();
                wait("a call that gets no answer", || {
                    if calls.len() < 8 {
                        calls.extend(call(net, 7000).ok());
                    }
                    net.b
                        .counter("connection_unanswered")
                        .is_ok_and(|count| count > 0)
                })?;
                // What is told later is told of what a firewall drops alone.
                net.b
                    .host
                    .shell("iptables -I INPUT -i dibs+ -p tcp --dport 7001 -j DROP")?;
                let _listener = listen(net, 7001)?;
                let _calling = call(net, 7001)?;
                wait("b to say that it does not answer", || {
                    is_told(&net.b, &["port 7001"])
                })?;
                let ports = silent(&net.b, true)?;
                ensure!(ports.len() == 1 && ports[0]["port"] == 7001, "{ports:?}");
                ensure!(!net.b.log().contains("port 7000"), "{}", net.b.log());
                Ok(())
            })
    });
}

/// Whoever is not there answers with RST, and a port that `accept` does not name is counted as refused.
#[test]
fn a_port_where_nobody_listens_refuses_and_one_that_nobody_may_call_is_not_told() {
    isolated(|| {
        Setup::new()
            .rule("bump = \"seal\"\ndport = \"7000-7001\"")
            .without_daemons()
            .run(|net| {
                let file = net.b.directory().join("dibsd.toml");
                let config = std::fs::read_to_string(&file)?;
                let narrow =
                    config.replacen("[peer.endpoints]", "accept = [7001]\n\n[peer.endpoints]", 1);
                ensure!(narrow != config, "{config}");
                std::fs::write(&file, narrow)?;
                net.start()?;
                let _refused = call(net, 7000)?;
                let nobody = call(net, 7001)?;
                // The kernel sends a SYN again after a second, and after two more.
                wait("the refused call to be repeated", || {
                    net.b
                        .counter("connection_refused")
                        .is_ok_and(|count| count >= 3)
                })?;
                let error = nobody.take_error()?.map(|error| error.kind());
                ensure!(error == Some(ErrorKind::ConnectionRefused), "{error:?}");
                for (node, here) in [(&net.b, true), (&net.a, false)] {
                    let ports = silent(node, here)?;
                    let is_7001 = |at: &Value| {
                        at["port"] == PORT + 1 && at["refuses"].as_bool() == Some(true)
                    };
                    ensure!(ports.len() == 1 && is_7001(&ports[0]), "{ports:?}");
                }
                ensure!(net.b.counter("connection_unanswered")? == 0);
                let _listener = listen(net, PORT + 1)?;
                let _answered = call(net, PORT + 1)?;
                wait("the port to answer", || {
                    let told = [silent(&net.b, true), silent(&net.a, false)];
                    told.iter()
                        .all(|told| told.as_ref().is_ok_and(Vec::is_empty))
                })
            })
    });
}
