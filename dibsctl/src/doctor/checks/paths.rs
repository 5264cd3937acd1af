//! Whether the paths are there, lead to the peer, and let UDP through.

use dibs_policy::sockets::Process;

use crate::doctor::finding::Finding;
use crate::doctor::host::{Answer, Way};

/// By the interface, the route and what a datagram brought.
pub(crate) fn judge(way: &Way) -> Finding {
    let finding = match &way.interface {
        _ if !way.known => {
            let why = "interfaces cannot be read without iproute2";
            Finding::skipped("path", why, "install the package iproute2")
        }
        Some(interface) => on_interface(way, interface).unwrap_or_else(|| reached(way)),
        None => reached(way),
    };
    finding.about(&way.path)
}

fn on_interface(way: &Way, interface: &str) -> Option<Finding> {
    let (found, advice) = match way.link {
        None => (
            format!("there is no interface {interface}"),
            "name another in [[path]] (ip link shows them), or plug it in".to_owned(),
        ),
        Some(link) if !link.up => (
            format!("{interface} is down"),
            format!("run ip link set dev {interface} up, and give it an address"),
        ),
        Some(link) if !link.carrier => (
            format!("{interface} is connected to nothing"),
            "plug in its cable, or join its network".to_owned(),
        ),
        Some(_) => return None,
    };
    Some(Finding::failed("path", found, advice))
}

fn reached(way: &Way) -> Finding {
    if let Some(why) = &way.unresolved {
        let advice = "check the name, and that the resolver answers (getent ahosts NAME)";
        return Finding::failed("path", why, advice);
    }
    let Some(remote) = way.remote else {
        return Finding::fine("path", "it is up, and waits for the peer");
    };
    if let Some(Err(why)) = &way.bound {
        return Finding::failed(
            "path",
            format!("it does not reach {}: {why}", remote.ip()),
            "give its interface an address of that network, or a route there",
        );
    }
    match &way.answer {
        None => Finding::fine("path", format!("it reaches {remote}")),
        Some(Answer::Nothing) => Finding::fine(
            "path",
            format!("it has a route to {remote}; only a session shows whether UDP gets through"),
        ),
        Some(Answer::Refused) => Finding::warning(
            "path",
            format!(
                "UDP reaches {}, but no program listens at {remote}",
                remote.ip()
            ),
            "start dibsd there",
        ),
        Some(Answer::Failed(why)) => Finding::failed(
            "path",
            format!("UDP does not reach {remote}: {why}"),
            "allow UDP to that port in the firewall of this host, and check the routers on the way",
        ),
    }
}

/// Whether the daemon's port is its own.
pub(crate) fn port(port: u16, holders: &Option<Vec<Process>>, root: bool) -> Finding {
    let Some(holders) = holders else {
        return Finding::fine("port", format!("UDP port {port} is free"));
    };
    if holders.is_empty() && !root {
        let why = format!("UDP port {port} is taken, and only root can see by which program");
        return Finding::skipped("port", why, "run doctor with sudo");
    }
    let named: Vec<String> = holders.iter().map(ToString::to_string).collect();
    let who = match named.is_empty() {
        true => "another program".to_owned(),
        false => named.join(", "),
    };
    Finding::failed(
        "port",
        format!("{who} has UDP port {port}"),
        "stop that program (ss -ulpn shows it), or set another port in [daemon] at both ends",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Outcome;
    use crate::doctor::host::{Hop, Link};

    fn good() -> Way {
        Way {
            path: "eth".to_owned(),
            interface: Some("eth0".to_owned()),
            known: true,
            link: Some(Link {
                up: true,
                carrier: true,
                mtu: 1500,
            }),
            remote: Some("10.0.1.2:5300".parse().unwrap()),
            bound: Some(Ok(Hop {
                device: "eth0".to_owned(),
                source: None,
                mtu: None,
            })),
            ..Way::default()
        }
    }

    #[test]
    fn what_a_path_lacks_is_named() {
        let link = |up, carrier| Link {
            up,
            carrier,
            mtu: 1500,
        };
        let cases = [
            (good(), Outcome::Ok, "reaches"),
            (
                Way {
                    link: None,
                    ..good()
                },
                Outcome::Failed,
                "no interface",
            ),
            (
                Way {
                    link: Some(link(false, false)),
                    ..good()
                },
                Outcome::Failed,
                "down",
            ),
            (
                Way {
                    link: Some(link(true, false)),
                    ..good()
                },
                Outcome::Failed,
                "nothing",
            ),
            (
                Way {
                    bound: Some(Err("Network is unreachable".to_owned())),
                    ..good()
                },
                Outcome::Failed,
                "unreachable",
            ),
            (
                Way {
                    answer: Some(Answer::Refused),
                    ..good()
                },
                Outcome::Warning,
                "no program listens",
            ),
            (
                Way {
                    answer: Some(Answer::Nothing),
                    ..good()
                },
                Outcome::Ok,
                "session",
            ),
            (
                Way {
                    answer: Some(Answer::Failed("EPERM".to_owned())),
                    ..good()
                },
                Outcome::Failed,
                "EPERM",
            ),
            (
                Way {
                    remote: None,
                    bound: None,
                    ..good()
                },
                Outcome::Ok,
                "waits for the peer",
            ),
            (
                Way {
                    remote: None,
                    bound: None,
                    unresolved: Some("the name home cannot be resolved: no answer".to_owned()),
                    ..good()
                },
                Outcome::Failed,
                "resolved",
            ),
            (
                Way {
                    known: false,
                    link: None,
                    ..good()
                },
                Outcome::Skipped,
                "iproute2",
            ),
        ];
        for (way, outcome, word) in cases {
            let finding = judge(&way);
            assert_eq!(finding.outcome, outcome, "{finding:?}");
            assert!(finding.found.contains(word), "{finding:?}");
        }
    }

    #[test]
    fn a_port_of_others() {
        let socat = Process {
            pid: 7,
            name: "socat".to_owned(),
        };
        let taken = Some(vec![socat]);
        let finding = port(5300, &taken, false);
        assert_eq!(finding.outcome, Outcome::Failed);
        assert_eq!(finding.found, "socat (pid 7) has UDP port 5300");
        let unseen = port(5300, &Some(Vec::new()), true);
        assert_eq!(unseen.found, "another program has UDP port 5300");
        assert_eq!(port(5300, &None, false).outcome, Outcome::Ok);
        // dibsd itself may have it.
        let hidden = port(5300, &Some(Vec::new()), false);
        assert_eq!(hidden.outcome, Outcome::Skipped);
    }
}
