//! What waits for a path that is away holds up nothing that needs it not.

use super::*;

/// Host 0 sends some by `bump` while `path` carries nothing any more, and then, by a seal that needs no such path,
/// many times what the peer may have to hold. That arrives, and what waits does once the path is back.
fn others_go_on(bump: u8, path: usize) {
    let mut pair = Pair::connected();
    pair.bump = bump;
    let data = text(4_000_000);
    pair.send(0, 1, &data[..50_000], 0, 1);
    pair.run(Duration::from_millis(200));
    pair.assert_stream(1, &data[..50_000]);
    pair.filter = Box::new(move |_, at, _| at != path);
    pair.send(0, 50_001, &data[50_000..100_000], 0, 2);
    pair.run(Duration::from_millis(200));
    let before = pair.injected[1].split_off(0);
    let waits = pair.nodes[0].peers[0].waiting.len();
    assert!(waits > 0, "it waits for the path");

    pair.nodes[0].peers[0].peer_store = 256 << 10;
    pair.bump = bump::SEAL;
    for (i, part) in data.chunks(50_000).enumerate() {
        pair.send(0, 5_000_000 + i as u32 * 50_000, part, 0, i as u32);
        pair.run(Duration::from_millis(10));
    }
    pair.run(Duration::from_secs(2));
    pair.assert_stream(1, &data);
    let peer = &pair.nodes[0].peers[0];
    assert!(peer.waiting.len() <= waits, "nothing else waits");
    assert!(peer.waiting.claim() < 256 << 10);

    pair.bump = bump;
    pair.injected[1] = before;
    pair.filter = Box::new(|_, _, _| true);
    pair.run(Duration::from_secs(5));
    pair.assert_stream(1, &data[..100_000]);
    assert!(pair.nodes[0].peers[0].waiting.is_empty());
}

#[test]
fn shares_wait_for_their_path_alone() {
    others_go_on(bump::SHARE, 1);
}

#[test]
fn what_only_trusted_paths_carry_waits_for_them_alone() {
    others_go_on(BUMP, 0);
}
