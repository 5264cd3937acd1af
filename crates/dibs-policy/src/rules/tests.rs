use std::fmt::Write as _;

use dibs_settings::BumpId;

use super::*;
use crate::nft::{attribute, attributes, text};
use crate::{ClassRule, DeviceName, Hours, Ports};

fn bump(id: u8, device: &str, owner: DeviceOwner, peers: &[&str]) -> BumpRoute {
    BumpRoute {
        id: BumpId::new(id).unwrap(),
        device: DeviceName::new(device).unwrap(),
        owner,
        addresses: Vec::new(),
        peers: peers.iter().map(|peer| peer.parse().unwrap()).collect(),
    }
}

fn class(id: u32, bump: u8, binding: Binding) -> ClassRule {
    ClassRule {
        binding,
        ..ClassRule::tcp(id, BumpId::new(bump).unwrap())
    }
}

fn net(text: &str) -> Option<IpNet> {
    Some(text.parse().unwrap())
}

/// Two bumps, one by another program's device, and rules that name whatever a rule may name.
fn everything() -> Desired {
    let peers = ["10.0.1.2/32", "10.2.0.0/16", "fd00::2/128"];
    let rules = vec![
        ClassRule {
            dport: Some(443.into()),
            ..class(1, 1, Binding::Required)
        },
        ClassRule {
            dport: Some(80.into()),
            interface: Some(DeviceName::new("eth0").unwrap()),
            terms: vec![Term::Gid(7), Term::Dscp(46)],
            ..class(2, 1, Binding::Loose)
        },
        ClassRule {
            sport: Some(Ports {
                first: 9000,
                last: 9009,
            }),
            uid: Some(1000),
            source: net("10.0.1.1/32"),
            destination: net("10.0.0.0/8"),
            ..class(3, 3, Binding::Required)
        },
        ClassRule {
            dport: Some(53.into()),
            hours: Some(Hours {
                start: 79_200,
                end: 21_600,
            }),
            ..class(4, 3, Binding::Loose)
        },
        ClassRule {
            family: Some(Family::V6),
            hours: Some(Hours {
                start: 28_800,
                end: 64_800,
            }),
            ..class(5, 1, Binding::Loose)
        },
        ClassRule {
            terms: vec![Term::parse("match", "-m length --length 0:99").unwrap()],
            ..class(6, 1, Binding::Loose)
        },
        ClassRule {
            dport: Some(25.into()),
            ..class(7, 1, Binding::Preferred)
        },
        ClassRule {
            dport: Some(26.into()),
            ..class(9, 2, Binding::Direct)
        },
        ClassRule {
            sport: Some(4000.into()),
            dport: Some(80.into()),
            source: net("10.0.1.1/32"),
            destination: net("10.0.1.2/32"),
            ..class(0, 1, Binding::Pinned)
        },
    ];
    Desired {
        bumps: vec![
            bump(1, "dibs1", DeviceOwner::Ours, &peers),
            bump(3, "tun9", DeviceOwner::Foreign, &["10.2.0.0/16"]),
        ],
        rules,
        sessions: vec![
            (net("10.2.0.0/16").unwrap(), false),
            (net("10.2.3.0/24").unwrap(), true),
            (net("fd00::2/128").unwrap(), true),
        ],
        ..Desired::default()
    }
}

fn wishes() -> Vec<(&'static str, Desired)> {
    let open = |desired| Desired {
        fail: Fail::Open,
        ..desired
    };
    let gateway = || Desired {
        gateway: ["192.168.7.0/24", "fd07::/64"]
            .map(|net| net.parse().unwrap())
            .into(),
        ..everything()
    };
    let mut free = gateway();
    free.rules.retain(|rule| rule.binding != Binding::Required);
    let one = Desired {
        bumps: vec![bump(2, "dibs2", DeviceOwner::Ours, &["10.0.1.2/32"])],
        ..Desired::default()
    };
    let idle = Desired {
        bumps: Vec::new(),
        rules: Vec::new(),
        ..gateway()
    };
    let exit = Desired {
        exit: ["0.0.0.0/0", "::/0"].map(|net| net.parse().unwrap()).into(),
        ..one.clone()
    };
    let everywhere = Desired {
        bumps: vec![bump(
            3,
            "dibs3",
            DeviceOwner::Ours,
            &["0.0.0.0/0", "10.9.0.0/16"],
        )],
        gateway: vec!["192.168.7.0/24".parse().unwrap()],
        refuse_quic: true,
        rules: vec![
            ClassRule {
                dport: Some(443.into()),
                ..class(8, 3, Binding::Required)
            },
            ClassRule {
                source: net("192.168.7.9/32"),
                ..class(10, 3, Binding::Direct)
            },
            ClassRule {
                dport: Some(80.into()),
                ..class(11, 3, Binding::Loose)
            },
            ClassRule {
                uid: Some(1000),
                terms: vec![Term::parse("match", "-m multiport --dports 80,443").unwrap()],
                ..class(12, 3, Binding::Loose)
            },
            class(13, 3, Binding::Preferred),
        ],
        sessions: vec![
            (net("10.9.0.0/16").unwrap(), true),
            (net("0.0.0.0/0").unwrap(), true),
        ],
        ..Desired::default()
    };
    let mut forwards = Desired {
        translates: true,
        ..everything()
    };
    forwards.bumps[0].addresses = vec!["10.0.1.1".parse().unwrap()];
    vec![
        ("one bump, no rule", one.clone()),
        ("one bump, failing open", open(one)),
        ("two bumps, all that rules name", everything()),
        ("a gateway", gateway()),
        ("a gateway, failing open", open(free)),
        ("a gateway without a bump", idle),
        ("an exit", exit),
        ("a gateway whose peer is an exit", everywhere),
        ("a host that forwards for containers", forwards),
    ]
}

/// All rules as they are told the kernel.
fn said() -> String {
    let mut text = String::new();
    for (name, desired) in wishes() {
        for family in Family::BOTH {
            let program = match family {
                Family::V4 => "iptables",
                Family::V6 => "ip6tables",
            };
            writeln!(text, "== {name}: {program}").unwrap();
            for chain in iptables(&desired, family) {
                let hook = chain
                    .hook
                    .map(|hook| format!(" in {hook}"))
                    .unwrap_or_default();
                writeln!(text, "{} {}{hook}", chain.table.as_str(), chain.name).unwrap();
                for rule in chain.rules {
                    writeln!(text, "    {rule}").unwrap();
                }
            }
        }
        writeln!(text, "== {name}: nftables").unwrap();
        for chain in nftables(&desired, true).chains {
            writeln!(
                text,
                "{}{}",
                chain.name,
                chain
                    .base()
                    .map_or_else(String::new, |base| format!(" {base:?}"))
            )
            .unwrap();
            for rule in chain.rules {
                writeln!(text, "    {}", decoded(rule.expressions())).unwrap();
            }
        }
    }
    text
}

#[test]
fn every_rule_as_the_kernel_is_told() {
    let said = said();
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/rules/said.txt");
    if std::env::var_os("DIBS_WRITE").is_some() {
        std::fs::write(file, &said).unwrap();
    }
    let kept = include_str!("said.txt");
    let differing = said
        .lines()
        .zip(kept.lines())
        .find(|(said, kept)| said != kept);
    assert!(said == kept, "{differing:?}");
}

/// What nftables is told of a rule, in words like those of nft(8).
fn decoded(expressions: &[u8]) -> String {
    let words = attributes(expressions).map(|(_, expression)| {
        let name = text(attribute(expression, 1).unwrap());
        let data = attribute(expression, 2).unwrap_or_default();
        let of = |kind| attribute(data, kind).unwrap_or_default();
        let number = |kind| {
            of(kind)
                .iter()
                .fold(0, |sum, byte| sum << 8 | u64::from(*byte))
        };
        let hex =
            |bytes: &[u8]| -> String { bytes.iter().map(|byte| format!("{byte:02x}")).collect() };
        let value = |kind| hex(attribute(of(kind), 1).unwrap_or_default());
        let pick = |names: &[(u64, &str)], number: u64| {
            let found = names.iter().find(|(known, _)| *known == number);
            found
                .unwrap_or_else(|| panic!("{name} {number}"))
                .1
                .to_owned()
        };
        match name.as_str() {
            "meta" => pick(
                &[
                    (3, "mark"),
                    (6, "iifname"),
                    (7, "oifname"),
                    (10, "skuid"),
                    (11, "skgid"),
                    (15, "nfproto"),
                    (16, "l4proto"),
                    (32, "hour"),
                ],
                number(2),
            ),
            "ct" if !of(4).is_empty() => "set ct mark".to_owned(),
            "ct" => {
                let key = pick(
                    &[
                        (0, "state"),
                        (1, "direction"),
                        (2, "status"),
                        (3, "mark"),
                        (10, "protocol"),
                        (11, "sport"),
                        (12, "dport"),
                        (19, "saddr"),
                        (20, "daddr"),
                        (21, "saddr6"),
                        (22, "daddr6"),
                    ],
                    number(2),
                );
                let original = if of(3).is_empty() { "" } else { "original " };
                format!("ct {original}{key}")
            }
            "payload" => {
                let base = pick(&[(1, "nh"), (2, "th")], number(2));
                format!("@{base},{},{}", number(3), number(4))
            }
            "cmp" => format!("{} {}", pick(&[(0, "=="), (1, "!=")], number(2)), value(3)),
            "bitwise" => format!("& {} ^ {}", value(4), value(5)),
            "range" => {
                let not = pick(&[(0, ""), (1, "not ")], number(2));
                format!("{not}in {}-{}", value(3), value(4))
            }
            "lookup" => format!("in {}", text(of(1))),
            "dynset" => format!("update {} for {} ms", text(of(1)), number(6)),
            "immediate" => {
                let verdict = attribute(of(2), 2).unwrap();
                let code = i32::from_be_bytes(attribute(verdict, 1).unwrap().try_into().unwrap());
                match code {
                    0 => "drop".to_owned(),
                    -5 => "return".to_owned(),
                    -4 => format!("goto {}", text(attribute(verdict, 2).unwrap())),
                    other => panic!("verdict {other}"),
                }
            }
            "fib" => format!("fib {:b}", number(3)),
            "nat" => "snat".to_owned(),
            "byteorder" | "counter" | "masq" => name,
            other => panic!("{other}"),
        }
    });
    words.collect::<Vec<_>>().join(" ")
}
