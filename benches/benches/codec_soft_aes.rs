//! The rows of the `codec` benchmark for AES in software, without the CPU's AES instructions.
//!
//! The `aes` crate is bitsliced, four blocks at a time, and takes constant time; the papers
//! measured plain C code.

use aes::{Aes128, Aes192, Aes256};
use dibs_benches::{
    BOTH_WAYS, MESSAGE, SIZES,
    block_cipher::{both_ways, one_way},
    criterion, group,
};

fn main() {
    assert!(
        !aes::hardware_accelerated(),
        "`cargo bench --bench codec` builds and starts this, for AES in software"
    );
    let mut criterion = criterion();
    for (name, len) in SIZES {
        let mut group = group(&mut criterion, name, len);
        one_way::<Aes128>(&mut group, "aes-128-soft", len);
        one_way::<Aes192>(&mut group, "aes-192-soft", len);
        one_way::<Aes256>(&mut group, "aes-256-soft", len);
        group.finish();
    }
    let mut group = group(&mut criterion, BOTH_WAYS, MESSAGE);
    both_ways::<Aes128>(&mut group, "aes-128-soft");
    both_ways::<Aes192>(&mut group, "aes-192-soft");
    both_ways::<Aes256>(&mut group, "aes-256-soft");
    group.finish();
    criterion.final_summary();
}
