//! The bump of docs/writing-a-bump.md, carried by two nodes.

use std::sync::Arc;

use super::*;
use crate::bump::{Bump, Method, Split};

// begin
/// Packet-level XOR: half of each datagram by one path, its XOR with the other half by the other.
#[derive(Debug)]
struct HalfXor;

impl Split for HalfXor {
    fn shares(&self) -> u8 {
        2
    }

    fn needed(&self) -> u8 {
        2
    }

    fn capacity(&self, share: usize) -> usize {
        2 * share
    }

    fn share_len(&self, len: usize) -> usize {
        len.div_ceil(2)
    }

    fn randomness(&self, _: usize) -> usize {
        0
    }

    fn split(&self, whole: &[u8], _: &[u8], shares: &mut [&mut [u8]]) {
        let [half, both] = shares else {
            panic!("there are as many shares as were asked for");
        };
        let (a, b) = whole.split_at(half.len());
        half.copy_from_slice(a);
        both.copy_from_slice(a);
        both.iter_mut().zip(b).for_each(|(both, b)| *both ^= b);
    }

    fn join(&self, shares: &[(u8, &[u8])], whole: &mut Vec<u8>) -> bool {
        let share = |wanted| shares.iter().find(|(index, _)| *index == wanted);
        let (Some((_, half)), Some((_, both))) = (share(0), share(1)) else {
            return false;
        };
        whole.clear();
        whole.extend_from_slice(half);
        whole.extend(half.iter().zip(*both).map(|(a, both)| a ^ both));
        true
    }
}

/// Its number in marks and on the wire, the same at both ends.
const HALF_XOR: BumpId = BumpId::new(4).unwrap();

/// Packet-level XOR.
fn half_xor() -> Bump {
    Bump {
        number: HALF_XOR,
        method: Method::Split(Arc::new(HalfXor)),
    }
}
// end

#[test]
fn the_documents_bump_is_this_one() {
    let this = include_str!("toy.rs");
    let code = this.split("// begin\n").nth(1).expect("it begins");
    let code = code.split("// end\n").next().expect("it ends");
    let document = include_str!("../../../../../docs/writing-a-bump.md");
    let shown: String = document
        .split("```rust\n")
        .skip(1)
        .filter_map(|block| block.split("```").next())
        .collect();
    assert_eq!(shown.replace("\n\n", "\n"), code.replace("\n\n", "\n"));
    assert!(document.lines().count() < 100);
}

#[test]
fn the_documents_bump_carries_a_stream() {
    let mut pair = Pair::new();
    for (host, node) in pair.nodes.iter_mut().enumerate() {
        let config = NodeConfig {
            bumps: vec![bump::scramble(), half_xor()],
            ..config(host, Integrity::On)
        };
        *node = Node::new(Time::ZERO, config, [host as u8; 32]).unwrap();
    }
    pair.run(Duration::from_secs(3));
    pair.assert_open();
    pair.bump = HALF_XOR;
    let mut loses = dice(5);
    pair.filter = Box::new(move |_, _, _| !loses());
    let before = pair.sent[0];
    let data = text(300_000);
    pair.pour(&data, 4, Duration::from_millis(10));
    pair.run(Duration::from_secs(3));
    pair.assert_stream(1, &data);
    // Nothing is added: each path carries half.
    for (path, before) in before.into_iter().enumerate() {
        let sent = pair.sent[0][path] - before;
        assert!((150_000..200_000).contains(&sent), "{sent} by path {path}");
    }
}
