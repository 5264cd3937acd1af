//! What iptables-save prints, as [rules](super::rules).

use super::rules::{Chain, Condition, Rule, Target, What};

/// Chains of dibs begin so; they are not judged here.
pub(crate) const OURS: &str = "DIBS-";

/// Tables in which packets are dropped, in the order in which the kernel asks them.
const TABLES: [&str; 3] = ["raw", "mangle", "filter"];

/// The chains of what iptables-save printed.
pub(crate) fn parse(saved: &str) -> Vec<Chain> {
    let mut chains: Vec<Chain> = Vec::new();
    let mut table = String::new();
    for line in saved.lines() {
        if let Some(name) = line.strip_prefix('*') {
            table = name.trim().to_owned();
        } else if let Some(declared) = line.strip_prefix(':') {
            let mut words = declared.split(' ');
            let name = words.next().unwrap_or_default();
            let policy = words.next().unwrap_or("-");
            chains.push(Chain {
                name: (table.clone(), name.to_owned()),
                hook: (policy != "-").then(|| name.to_ascii_lowercase()),
                drops: policy == "DROP",
                rules: Vec::new(),
            });
        } else if let Some(rest) = line.strip_prefix("-A ")
            && let Some((chain, rule)) = rest.split_once(' ')
            && let Some(chain) =
                { chains.iter_mut() }.find(|known| known.name.0 == table && known.name.1 == chain)
        {
            let text = format!("\"{line}\" in table {table}");
            chain.rules.push(self::rule(text, rule));
        }
    }
    chains.retain(|chain| TABLES.contains(&chain.name.0.as_str()));
    chains.sort_by_key(|chain| TABLES.iter().position(|table| *table == chain.name.0));
    chains
}

/// Rules of others in what iptables-save printed: their table, and their line.
pub(crate) fn others(saved: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut table = "";
    saved.lines().filter_map(move |line| {
        table = line.strip_prefix('*').map_or(table, str::trim);
        let of_ours = |rest: &str| rest.starts_with(OURS) || rest.contains("-j DIBS-");
        let rest = line.strip_prefix("-A ")?;
        (!of_ours(rest)).then_some((table, line))
    })
}

fn rule(text: String, rule: &str) -> Rule {
    let words = words(rule);
    let mut conditions = Vec::new();
    let mut target = Target::Nothing;
    let mut negated = false;
    let mut at = 0;
    while let Some(word) = words.get(at) {
        at += 1;
        let value = words.get(at).map_or("", String::as_str);
        let list = || value.split(',').map(str::to_owned).collect::<Vec<_>>();
        let what = match word.as_str() {
            "!" => {
                negated = true;
                continue;
            }
            "-m" | "--comment" | "--log-prefix" | "--reject-with" => {
                at += 1;
                // Matches that tell by their options what they ask.
                let known = [
                    "addrtype",
                    "comment",
                    "conntrack",
                    "state",
                    "tcp",
                    "udp",
                    "multiport",
                ];
                if word != "-m" || known.contains(&value) {
                    continue;
                }
                Some(What::Unknown)
            }
            "-j" | "-g" => {
                target = match value {
                    "ACCEPT" => Target::Accept,
                    "DROP" | "REJECT" => Target::Drop,
                    "RETURN" => Target::Return,
                    "LOG" | "NFLOG" | "MARK" | "CONNMARK" | "TCPMSS" | "CT" | "NOTRACK" => {
                        Target::Nothing
                    }
                    chain if chain.starts_with(OURS) => Target::Nothing,
                    chain => Target::Jump(chain.to_owned()),
                };
                // What follows is the target's.
                break;
            }
            "-i" => Some(What::In(vec![value.to_owned()])),
            "-o" => Some(What::Out(vec![value.to_owned()])),
            "-p" => Some(What::Protocol(vec![value.to_owned()])),
            "-s" => Some(nets(value).map_or(What::Unknown, What::Source)),
            "-d" => Some(nets(value).map_or(What::Unknown, What::Destination)),
            "--dport" | "--dports" => Some(spans(&list()).map_or(What::Unknown, What::Dport)),
            "--dst-type" => Some(What::AddressType(list())),
            "--ctstate" | "--state" => Some(What::State(
                list().iter().map(|state| state.to_lowercase()).collect(),
            )),
            option if option.starts_with('-') => Some(What::Unknown),
            // The value of an option that is not understood.
            _ => None,
        };
        if let Some(what) = what {
            let takes = !matches!(what, What::Unknown);
            conditions.push(Condition { negated, what });
            at += usize::from(takes);
        }
        negated = false;
    }
    Rule {
        text,
        conditions,
        target,
    }
}

fn nets(text: &str) -> Option<Vec<ipnet::IpNet>> {
    let net = |part: &str| {
        let host = part.parse::<std::net::IpAddr>().map(ipnet::IpNet::from);
        part.parse().or(host).ok()
    };
    text.split(',').map(net).collect()
}

fn spans(list: &[String]) -> Option<Vec<(u16, u16)>> {
    let span = |text: &String| {
        let (from, to) = text.split_once(':').unwrap_or((text, text));
        Some((from.parse().ok()?, to.parse().ok()?))
    };
    list.iter().map(span).collect()
}

/// The words of a line; what stands in quotes is one.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut quoted, mut escaped) = (String::new(), false, false);
    for c in line.chars() {
        match c {
            _ if escaped => {
                word.push(c);
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => quoted = !quoted,
            ' ' if !quoted => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            c => word.push(c),
        }
    }
    if !word.is_empty() {
        words.push(word);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::rules::{Packet, dropped_by};

    fn answer(saved: &str) -> Option<String> {
        let packet = Packet {
            inbound: true,
            passes: false,
            interface: "dibs1".to_owned(),
            other: None,
            protocol: "tcp",
            source: Some("10.0.1.2".parse().unwrap()),
            destination: None,
            dport: None,
            state: "established",
        };
        dropped_by(&parse(saved), &packet)
    }

    fn filter(policy: &str, rules: &str) -> String {
        format!("*filter\n:INPUT {policy} [0:0]\n:user - [0:0]\n{rules}COMMIT\n")
    }

    #[test]
    fn a_rule_on_the_device_drops() {
        let rule = "-A INPUT -i dibs1 -j DROP";
        let said = answer(&filter("ACCEPT", &format!("{rule}\n")));
        assert_eq!(said, Some(format!("\"{rule}\" in table filter")));
        for harmless in [
            "-A INPUT -i dibs2 -j DROP",
            "-A INPUT -o dibs1 -j DROP",
            "-A INPUT ! -i dibs+ -j DROP",
            "-A INPUT -p udp -j DROP",
            "-A INPUT ! -s 10.0.0.0/8 -j DROP",
            "-A INPUT -m conntrack --ctstate INVALID -j DROP",
            "-A INPUT -j LOG --log-prefix \"a -j DROP\"",
            "-A OUTPUT -j DROP",
        ] {
            let said = answer(&filter("ACCEPT", &format!("{harmless}\n")));
            assert_eq!(said, None, "{harmless}");
        }
    }

    #[test]
    fn what_is_established_passes_a_closed_firewall() {
        let rules =
            "-A INPUT -j user\n-A user -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n";
        assert_eq!(answer(&filter("DROP", rules)), None);
        let bound = "-A INPUT -i eth0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n";
        assert_eq!(
            answer(&filter("DROP", bound)),
            Some("the policy of INPUT".to_owned())
        );
    }

    #[test]
    fn what_is_not_understood_is_not_named() {
        for (policy, rules) in [
            ("ACCEPT", "-A INPUT -m rpfilter --invert -j DROP\n"),
            ("DROP", "-A INPUT -m mark --mark 0x1 -j ACCEPT\n"),
            (
                "ACCEPT",
                "-A INPUT -j user\n-A user -j RETURN\n-A user -j DROP\n",
            ),
            (
                "ACCEPT",
                "-A INPUT -m mark --mark 0x1 -j user\n-A user -j DROP\n",
            ),
        ] {
            assert_eq!(answer(&filter(policy, rules)), None, "{rules}");
        }
        let behind = "-A INPUT -m rpfilter --invert -j DROP\n-A INPUT -p tcp -j DROP\n";
        let by = "\"-A INPUT -p tcp -j DROP\" in table filter".to_owned();
        assert_eq!(answer(&filter("ACCEPT", behind)), Some(by));
    }

    #[test]
    fn chains_that_call_each_other_end() {
        let rules = "-A INPUT -j user\n-A user -j user\n";
        assert_eq!(answer(&filter("ACCEPT", rules)), None);
    }

    #[test]
    fn ours_are_not_those_of_others() {
        let saved =
            "*mangle\n-A OUTPUT -j DIBS-OUTPUT\n-A DIBS-OUTPUT -j MARK\n-A OUTPUT -j MARK\n";
        let found: Vec<_> = others(saved).collect();
        assert_eq!(found, [("mangle", "-A OUTPUT -j MARK")]);
    }
}
