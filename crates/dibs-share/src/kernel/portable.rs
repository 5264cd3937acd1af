//! Eight bytes at a time in integer registers, for every CPU, and for what is shorter than the
//! registers of the others.

use super::rows::Register;
use crate::field;

pub(super) fn sum(out: &mut [u8], factors: &[u8], rows: &[&[u8]]) {
    if out.len() < size_of::<u64>() {
        return sum_bytes(out, factors, rows);
    }
    Register {
        zero: || 0,
        plus: |sum: u64, bytes: &_| sum ^ u64::from_le_bytes(*bytes),
        plus_times: |sum: u64, by, bytes: &_| sum ^ field::times(by, u64::from_le_bytes(*bytes)),
        store: |sum: u64, place: &mut _| *place = sum.to_le_bytes(),
    }
    .sum(out, factors, rows);
}

fn sum_bytes(out: &mut [u8], factors: &[u8], rows: &[&[u8]]) {
    for (i, out) in out.iter_mut().enumerate() {
        let terms = factors.iter().zip(rows);
        *out = terms.fold(0, |sum, (&by, row)| {
            sum ^ field::times(by, u64::from(row[i])) as u8
        });
    }
}
