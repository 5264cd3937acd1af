//! The one list means the same to iptables and to nftables: what the one marks the other, alone, does not let out
//! unmarked, and both guards drop the same.

use std::io::{Read as _, Write as _};
use std::net::{TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use dibs_netns::HANG;
use dibs_policy::conntrack::Conntrack;
use dibs_policy::{Backstop, Binding, ClassRule, Desired, Known, Steering};
use dibs_wire::FlowKey;
use socket2::SockRef;

use crate::lab::{ENDS, Lab, address, bump, marks, net_of, wish};

/// Who is asked.
enum Layer {
    Iptables(Steering),
    Nftables(Backstop),
}

impl Layer {
    /// What it alone dropped of what was to leave.
    fn dropped(&mut self, lab: &Lab) -> u64 {
        match self {
            Layer::Iptables(steering) => {
                let drops = lab.wait(steering.counting().drops()).expect("counters");
                let drops = drops.by_reason();
                drops["plain_out_marked"] + drops["plain_out_required"]
            }
            Layer::Nftables(backstop) => lab.wait(backstop.dropped()).expect("counters"),
        }
    }
}

/// Each layer in turn, alone, once `prepare` has made what it needs before anything is wanted; no mark leads to the TUN,
/// so what is marked meets the guard.
fn each_alone<T, U>(
    lab: &Lab,
    desired: &Desired,
    prepare: impl Fn() -> T,
    ask: impl Fn(&mut Layer, T) -> U,
) -> [U; 2] {
    let free = Desired {
        rules: Vec::new(),
        ..wish()
    };
    [false, true].map(|nftables| {
        let mut steering = lab.steered(&free);
        let prepared = prepare();
        lab.set(&mut steering, desired);
        lab.sh("ip rule del priority 5200; ip -6 rule del priority 5200");
        if !nftables {
            return ask(&mut Layer::Iptables(steering), prepared);
        }
        let mut backstop = lab.open(Backstop::open);
        let set = lab.wait(backstop.set(desired, &Known::default()));
        set.expect("a table of nftables");
        for program in ["iptables", "ip6tables"] {
            lab.iptables(program, "-t mangle -F");
        }
        let mut layer = Layer::Nftables(backstop);
        let answer = ask(&mut layer, prepared);
        drop(layer);
        lab.sh("nft delete table inet dibs 2>/dev/null || true");
        answer
    })
}

fn class(binding: Binding) -> Vec<ClassRule> {
    let rule = ClassRule {
        dport: Some(80.into()),
        binding,
        ..ClassRule::tcp(1, bump(1))
    };
    vec![rule]
}

pub(crate) fn what_iptables_marks_nftables_drops(lab: &Lab) {
    let (on_bump, chosen) = (marks().bump(bump(1)), marks().override_bit());
    let values = [0, chosen, on_bump, on_bump | chosen];
    let peers = |up| -> Vec<_> {
        let net = |(_, there): (&str, &str)| (net_of(there), up);
        ENDS.map(net).into()
    };
    for (what, rules, up) in [
        ("no rule", Vec::new(), true),
        ("a rule", class(Binding::Loose), true),
        ("required", class(Binding::Required), true),
        ("preferred, with a session", class(Binding::Preferred), true),
        ("preferred, without", class(Binding::Preferred), false),
    ] {
        let desired = Desired {
            rules,
            sessions: peers(up),
            ..wish()
        };
        let prepare = || values.map(|_| ENDS.map(|(_, there)| lab.connected(80, there)));
        let answers = each_alone(lab, &desired, prepare, |layer, connections| {
            let mut conntrack = lab.open(Conntrack::open);
            let cases = values.into_iter().zip(connections);
            let asked = cases.map(|(value, ends)| {
                ends.map(|(near, far)| {
                    let local = near.local_addr().expect("bound");
                    let tuple = FlowKey::tcp(local, near.peer_addr().expect("connected"));
                    let mask = marks().mask();
                    let marked = lab.wait(conntrack.set_mark(&tuple, value, mask));
                    assert!(marked.expect("marked"), "tracked");
                    is_dropped(lab, layer, near, far)
                })
            });
            asked.collect::<Vec<_>>()
        });
        assert_eq!(answers[0], answers[1], "{what}: iptables, nftables");
        // Without a choice, plain by choice, on the bump, there by choice.
        let expected = match what {
            "required" => [true; 4],
            "no rule" | "preferred, without" => [false, false, true, true],
            _ => [true, false, true, true],
        };
        assert_eq!(answers[0], expected.map(|dropped| [dropped; 2]), "{what}");
    }
}

/// Whether what is sent now is dropped; else it arrives.
fn is_dropped(lab: &Lab, layer: &mut Layer, mut near: TcpStream, mut far: TcpStream) -> bool {
    let before = layer.dropped(lab);
    near.write_all(b"x").expect("sent");
    far.set_nonblocking(true).expect("nonblocking");
    let start = Instant::now();
    let dropped = loop {
        if layer.dropped(lab) > before {
            break true;
        }
        if far.read(&mut [0; 8]).is_ok() {
            break false;
        }
        assert!(start.elapsed() < HANG, "neither dropped nor there");
    };
    // At once, or what is sent again would be counted with the next.
    for end in [&near, &far] {
        let reset = SockRef::from(end).set_linger(Some(Duration::ZERO));
        reset.expect("no lingering");
    }
    dropped
}

pub(crate) fn both_guards_drop_the_same(lab: &Lab) {
    let desired = Desired {
        rules: Vec::new(),
        ..wish()
    };
    let counted = each_alone(
        lab,
        &desired,
        || (),
        |layer, ()| {
            let send = |(value, (here, there)): (u32, (&str, &str))| {
                let socket = UdpSocket::bind(address(here, 0)).expect("a socket");
                let mark = value << marks().bump_mask().trailing_zeros();
                SockRef::from(&socket).set_mark(mark).expect("a mark");
                let before = layer.dropped(lab);
                // That it was dropped the sender may be told.
                let _ = socket.send_to(b"x", address(there, 9));
                layer.dropped(lab) - before
            };
            let cases = (0..16).flat_map(|value| ENDS.map(|ends| (value, ends)));
            cases.map(send).collect::<Vec<_>>()
        },
    );
    // Plain and own datagrams pass.
    let expected = (0..16).flat_map(|value| [u64::from((1..15).contains(&value)); 2]);
    assert_eq!(counted[0], expected.collect::<Vec<_>>());
    assert_eq!(counted[0], counted[1], "iptables, nftables");
}
