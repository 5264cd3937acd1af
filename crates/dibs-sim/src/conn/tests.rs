//! A connection between two kernels side by side.

use super::*;
use crate::kernel::Way;
use crate::offload;

/// An answer, of which all but the first segment is lost while the window is closed, comes although it was said
/// after the other end had closed: in LAST-ACK nobody would learn that the window opens (seed 990069).
#[test]
fn an_answer_outlives_a_closed_window() {
    let plan = Plan {
        cubic: false,
        ..Plan::ordinary([100, 5000], Order::HalfClose, 64 << 10)
    };
    let addresses = crate::world::addresses();
    let mut kernels = [0, 1].map(|h| Kernel::new(h as u64, &addresses[h], 1500, 7));
    let [a, b] = &mut kernels;
    let mut conn = Conn::open(0, plan, (4000, 80), addresses, [a, b]);
    let (mut now, mut answered, mut lost) = (Time::ZERO, false, 0);
    for millis in 0..300_000 {
        now += Duration::from_millis(1);
        for host in 0..2 {
            conn.work(now, host, &mut kernels[host]).unwrap();
            for mut packet in kernels[host].poll(now) {
                let s = offload::tcp(&packet).unwrap();
                let carries = host == 1 && !s.payload.is_empty();
                if millis < 100 && answered {
                    if host == 1 {
                        lost += 1;
                        continue;
                    }
                    packet = offload::rewrite(&packet, |headers, _| headers.window = 0);
                }
                answered |= carries;
                kernels[1 - host].receive(packet, Way::Plain).unwrap();
            }
        }
        if conn.is_done() {
            break;
        }
    }
    assert!(lost > 1, "{lost} segments were lost");
    assert!(
        conn.is_done(),
        "{}",
        conn.describe([&kernels[0], &kernels[1]])
    );
}

/// Who has closed and reads slowly is given all, though its host sleeps for longer than TIME-WAIT lasts (seed
/// 1282455).
#[test]
fn what_was_not_read_outlives_time_wait() {
    let plan = Plan {
        slow: Some(Duration::from_secs(1)),
        ..Plan::ordinary([20_000, 0], Order::Both, 64 << 10)
    };
    let addresses = crate::world::addresses();
    let mut kernels = [0, 1].map(|h| Kernel::new(h as u64, &addresses[h], 1500, 7));
    let [a, b] = &mut kernels;
    let mut conn = Conn::open(0, plan, (4000, 80), addresses, [a, b]);
    let mut now = Time::ZERO;
    for millis in 0..1000 {
        let step = if millis == 500 { 20_000 } else { 1 };
        now += Duration::from_millis(step);
        for host in 0..2 {
            let sent = kernels[host].poll(now);
            for packet in sent {
                kernels[1 - host].receive(packet, Way::Plain).unwrap();
            }
            conn.work(now, host, &mut kernels[host]).unwrap();
        }
    }
    assert!(
        conn.is_done(),
        "{}",
        conn.describe([&kernels[0], &kernels[1]])
    );
}
