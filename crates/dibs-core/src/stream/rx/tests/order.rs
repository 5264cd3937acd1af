//! What the kernel gets in the order of sending, and what it does not get.

use super::*;

const LEN: usize = 100;

/// A chain of five pieces, and what is restored of it.
struct Scene {
    plain: Vec<u8>,
    pieces: Vec<Sent>,
    stream: RxStream,
    store: Store,
    kernel: Kernel,
}

impl Scene {
    fn new() -> Self {
        let plain = plain(5 * LEN);
        Self {
            pieces: chain(1, BASE_OFFSET, &plain, &[LEN]),
            plain,
            stream: RxStream::default(),
            store: Store::new(1 << 20),
            kernel: Kernel::default(),
        }
    }

    fn feed(&mut self, piece: usize) -> ChunkOutcome {
        self.take(piece, false)
    }

    /// The second piece comes as one that is withheld.
    fn withhold(&mut self) -> ChunkOutcome {
        self.take(1, true)
    }

    fn take(&mut self, piece: usize, withheld: bool) -> ChunkOutcome {
        let piece = Piece {
            withheld,
            ..self.pieces[piece].piece()
        };
        self.stream
            .chunk(&piece, &Keys, &mut self.store, &mut self.kernel)
    }

    /// The second piece is sent again when `sent` pieces have been sent.
    fn again(&mut self, sent: usize) -> ChunkOutcome {
        let again = solo(1, &self.plain, LEN, LEN);
        let piece = Piece {
            ahead: ((sent - 1) * LEN) as u32,
            ..again.piece()
        };
        self.stream
            .chunk(&piece, &Keys, &mut self.store, &mut self.kernel)
    }

    /// The pieces that the kernel has, in the order in which it got them.
    fn got(&self) -> Vec<usize> {
        self.kernel.coverage(&self.plain);
        let place = |offset: u64| (offset - BASE_OFFSET) as usize / LEN;
        { self.kernel.got.iter() }
            .map(|(offset, _)| place(*offset))
            .collect()
    }
}

#[test]
fn what_is_withheld_is_part_of_its_chain() {
    for late in [false, true] {
        let mut scene = Scene::new();
        scene.feed(0);
        if late {
            assert_eq!(scene.feed(2), ChunkOutcome::Held);
            assert_eq!(scene.withhold(), ChunkOutcome::Restored);
        } else {
            assert_eq!(scene.withhold(), ChunkOutcome::Restored);
            assert_eq!(scene.feed(2), ChunkOutcome::Restored);
        }
        assert_eq!(scene.got(), [0, 2]);
        assert_eq!(scene.again(3), ChunkOutcome::Restored);
        assert_eq!(scene.got(), [0, 2, 1]);
        assert_eq!(scene.store.held(), 0);
    }
}

#[test]
fn what_is_sent_again_does_not_overtake() {
    let mut scene = Scene::new();
    scene.feed(0);
    scene.withhold();
    assert_eq!(scene.again(4), ChunkOutcome::Held);
    assert!(scene.stream.holds_back());
    assert_eq!(scene.feed(3), ChunkOutcome::Held);
    assert_eq!(scene.got(), [0]);
    assert_eq!(scene.feed(2), ChunkOutcome::Restored);
    assert_eq!(scene.got(), [0, 2, 3, 1]);
    assert!(!scene.stream.holds_back());
    assert_eq!(scene.feed(4), ChunkOutcome::Restored);
    assert_eq!(scene.store.held(), 0);
}

#[test]
fn what_is_sent_again_does_not_wait_for_ever() {
    // For a time.
    let mut scene = Scene::new();
    scene.feed(0);
    scene.withhold();
    assert_eq!(scene.again(4), ChunkOutcome::Held);
    let ended = scene
        .stream
        .release_start(&mut scene.store, &mut scene.kernel);
    assert_eq!((ended, scene.got()), (None, vec![0, 1]));
    assert_eq!(scene.store.held(), 0);
    // Until another epoch begins: the one before perhaps ended early.
    let mut scene = Scene::new();
    scene.feed(0);
    scene.withhold();
    assert_eq!(scene.again(4), ChunkOutcome::Held);
    let next = chain(
        2,
        BASE_OFFSET + 3 * LEN as u64,
        &scene.plain[3 * LEN..],
        &[LEN],
    );
    feed(
        &mut scene.stream,
        &mut scene.store,
        &mut scene.kernel,
        &next[0],
    );
    assert_eq!(scene.got(), [0, 3, 1]);
    assert_eq!(scene.store.held(), 0);
    // Nor does it outlive its connection.
    let mut scene = Scene::new();
    scene.feed(0);
    assert_eq!(scene.again(4), ChunkOutcome::Restored);
    scene.withhold();
    assert_eq!(scene.again(4), ChunkOutcome::Held);
    scene.stream.clear(&mut scene.store);
    assert_eq!(scene.store.held(), 0);
}

#[test]
fn what_a_peer_says_to_lie_beyond_all_offsets_is_no_more_than_that() {
    let mut scene = Scene::new();
    let again = solo(1, &scene.plain, LEN, LEN);
    // By far too far: it came to be sent before anything of its epoch did.
    for (offset, ahead) in [(u64::MAX - 1, u32::MAX), (u64::MAX, 1)] {
        let piece = Piece {
            ahead,
            offset,
            ..again.piece()
        };
        let outcome = scene
            .stream
            .chunk(&piece, &Keys, &mut scene.store, &mut scene.kernel);
        // The initial buffer hangs on the offset, so it restores to something else.
        assert_eq!(outcome, ChunkOutcome::Contradiction);
    }
    assert_eq!(scene.store.held(), 0);
}
