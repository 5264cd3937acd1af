//! Block ciphers as the papers measured them: block by block without chaining (ECB).

use std::hint::black_box;

use aes::cipher::{Array, BlockCipherDecrypt, BlockCipherEncrypt, Key, KeyInit};

use crate::{Group, MESSAGE, message};

/// Encrypts `len` bytes.
pub fn one_way<C: KeyInit + BlockCipherEncrypt>(group: &mut Group<'_>, id: &str, len: usize) {
    let cipher = C::new(&key::<C>());
    let mut buf = message(len);
    group.bench_function(id, |b| {
        b.iter(|| cipher.encrypt_blocks(Array::slice_as_chunks_mut(black_box(&mut buf)).0));
    });
}

/// Encrypts one message and decrypts it.
pub fn both_ways<C>(group: &mut Group<'_>, id: &str)
where
    C: KeyInit + BlockCipherEncrypt + BlockCipherDecrypt,
{
    let cipher = C::new(&key::<C>());
    let mut buf = message(MESSAGE);
    group.bench_function(id, |b| {
        b.iter(|| {
            let blocks = Array::slice_as_chunks_mut(black_box(&mut buf)).0;
            cipher.encrypt_blocks(blocks);
            cipher.decrypt_blocks(black_box(blocks));
        });
    });
}

fn key<C: KeyInit>() -> Key<C> {
    Array::from_fn(|i| i as u8 * 37 + 1)
}
