//! Secrets are gone from memory once nobody uses them: an allocator that looks into every block that is
//! freed, while handshakes are finished, refused and given up.

use core::time::Duration;
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock};

use dibs_core::Time;
use dibs_core::session::{
    Arrived, Config, Dropped, Hello, Integrity, PeerId, PublicKey, Random, Secret, SeededRandom,
    Sessions, StaticSecret, Suite, Way,
};
use dibs_settings::Handshake;

/// The system's, looking at what is given back to it.
struct Watching;

#[global_allocator]
static ALLOCATOR: Watching = Watching;

// SAFETY: all that allocates is the system's allocator; what comes between does not change the blocks.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps what `GlobalAlloc` asks for.
        unsafe { System.alloc(layout) }
    }

    // What grows goes by `alloc` and `dealloc`: the provided `realloc` does.
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if WATCHED.load(SeqCst) {
            look_into(block.expose_provenance(), layout.size());
        }
        // SAFETY: as above.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Secrets at once, at most.
const MOST: usize = 64;
/// So many bytes of a secret in a row are the secret.
const PART: usize = 16;

static WATCHED: AtomicBool = AtomicBool::new(false);
/// The secrets, each bit turned, so that they are not found in the test itself.
static SECRETS: [[AtomicU8; 32]; MOST] = [const { [const { AtomicU8::new(0) }; 32] }; MOST];
static KNOWN: AtomicUsize = AtomicUsize::new(0);
/// How many freed blocks had each of them.
static FOUND: [AtomicUsize; MOST] = [const { AtomicUsize::new(0) }; MOST];

/// Searches a block of this process for parts of secrets. It is read as a file, as some of it may never have been
/// written. Allocates nothing.
fn look_into(at: usize, len: usize) {
    static MEMORY: OnceLock<File> = OnceLock::new();
    let memory = MEMORY.get_or_init(|| File::open("/proc/self/mem").expect("our own memory"));
    let mut bytes = [0; 4096];
    let mut from = 0;
    while from + PART <= len {
        let want = bytes.len().min(len - from);
        let read = { memory.read_exact_at(&mut bytes[..want], (at + from) as u64) };
        read.expect("a block that is still allocated");
        for number in 0..KNOWN.load(SeqCst) {
            if has_part_of(&SECRETS[number], &bytes[..want]) {
                FOUND[number].fetch_add(1, SeqCst);
            }
        }
        from += (want - PART + 1).max(1);
    }
}

fn has_part_of(secret: &[AtomicU8; 32], bytes: &[u8]) -> bool {
    let is_at = |part: &[AtomicU8], window: &[u8]| {
        let mut pairs = part.iter().zip(window);
        pairs.all(|(turned, byte)| turned.load(SeqCst) == !byte)
    };
    let mut windows = bytes.windows(PART);
    windows.any(|window| secret.chunks(PART).any(|part| is_at(part, window)))
}

/// From now on nobody may leave these bytes behind.
fn guard(secret: &[u8; 32]) {
    let number = KNOWN.load(SeqCst);
    for (turned, byte) in SECRETS[number].iter().zip(secret) {
        turned.store(!byte, SeqCst);
    }
    KNOWN.store(number + 1, SeqCst);
}

/// Runs `what`; returns which of the secrets guarded until its end were found in freed blocks, and how often.
fn leaked_by(what: impl FnOnce()) -> Vec<(usize, usize)> {
    // One test at a time.
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock();
    KNOWN.store(0, SeqCst);
    FOUND.iter().for_each(|found| found.store(0, SeqCst));
    WATCHED.store(true, SeqCst);
    what();
    WATCHED.store(false, SeqCst);
    let found = FOUND.iter().map(|found| found.load(SeqCst)).enumerate();
    let found = found.filter(|(_, times)| *times > 0).collect();
    drop(turn);
    found
}

/// A generator each of whose keys is guarded.
struct Guarded(SeededRandom);

impl Random for Guarded {
    fn fill(&mut self, out: &mut [u8]) {
        self.0.fill(out);
        if let Ok(key) = <&[u8; 32]>::try_from(&*out) {
            guard(key);
        }
    }
}

/// A key that is only written where it belongs.
fn private(seed: u8) -> Box<StaticSecret> {
    let bytes: [u8; 32] =
        std::array::from_fn(|i| seed.wrapping_mul(31) ^ (i as u8).wrapping_mul(7));
    guard(&bytes);
    Box::new(StaticSecret::from(bytes))
}

fn preshared() -> Box<Secret> {
    let bytes: [u8; 32] = std::array::from_fn(|i| 0xa5 ^ (i as u8).wrapping_mul(11));
    Box::new(Secret::new(bytes))
}

/// One end that knows some others.
struct End {
    sessions: Sessions,
    peers: Vec<PeerId>,
    rng: Guarded,
}

impl End {
    fn new(own: u8, others: &[u8]) -> Self {
        let mut rng = Guarded(SeededRandom::new([own; 32]));
        let config = Config {
            private: private(own),
            suite: Suite::ChaCha20Poly1305,
            integrity: Integrity::On,
            handshake: Handshake::Any,
        };
        let mut sessions = Sessions::new(config, Time::ZERO, &mut rng);
        let add = |other: &u8| {
            let public = PublicKey::from(&*private(*other));
            sessions.add_peer(public, Some(preshared())).unwrap()
        };
        let peers = others.iter().map(add).collect();
        Self {
            sessions,
            peers,
            rng,
        }
    }

    fn call(&mut self, number: usize) -> Vec<u8> {
        let (wall, hello) = (Duration::from_secs(1_700_000_000), Hello::default());
        let peer = self.peers[number];
        { &mut self.sessions }.initiate(
            Time::ZERO,
            wall,
            peer,
            Way::new(false),
            &hello,
            &mut self.rng,
        )
    }

    /// Takes a handshake datagram; returns the answer, and why there is none.
    fn take(&mut self, datagram: &[u8]) -> (Option<Vec<u8>>, Option<Dropped>) {
        let arrived = Arrived {
            path: 0,
            trusted: false,
            from: "192.0.2.1:5300".parse().unwrap(),
            peer_there: None,
            under_load: false,
        };
        let (now, rng) = (Time::ZERO, &mut self.rng);
        let hello = |_| Hello::default();
        let outcome = { &mut self.sessions }.handle(now, arrived, datagram, hello, rng);
        (outcome.reply, outcome.dropped)
    }
}

/// What is left lying is found: else the other tests would say nothing.
#[test]
fn keys_that_are_left_in_freed_memory_are_found() {
    let leaked = leaked_by(|| {
        let (key, other) = ([0x17; 32], [0x71; 32]);
        guard(&key);
        guard(&other);
        drop([vec![0; 5000], key[..20].to_vec()].concat());
        drop(Box::new(StaticSecret::from(other)));
    });
    assert_eq!(leaked.len(), 1, "{leaked:?}");
    let (number, times) = leaked[0];
    assert!(number == 0 && times >= 1, "{leaked:?}");
}

/// Handshakes that are finished, refused and given up leave no key behind: not of the hosts, not those that they drew
/// for these handshakes, and not the one that they share.
#[test]
fn handshakes_leave_no_key_in_freed_memory() {
    let leaked = leaked_by(|| {
        guard(preshared().as_bytes());
        let mut host = End::new(1, &[2, 3, 4, 5, 6]);
        let mut other = End::new(2, &[1]);
        let mut stranger = End::new(7, &[1]);

        // The ordinary course.
        let (answer, dropped) = other.take(&host.call(0));
        assert_eq!(dropped, None);
        let answer = answer.unwrap();
        assert_eq!(host.take(&answer).1, None);

        // A call that is read in vain, and some that nobody answers, again and again.
        let (answer, dropped) = host.take(&stranger.call(0));
        assert!(answer.is_none());
        assert_eq!(dropped, Some(Dropped::UnknownPeer));
        for _ in 0..3 {
            for number in 1..host.peers.len() {
                host.call(number);
            }
        }
    });
    let names = "preshared, then as they were drawn";
    assert_eq!(leaked, [], "({names}, freed blocks with it)");
}
