//! GF(2^8) with the polynomial x^8 + x^4 + x^3 + x + 1, 0x11b (FIPS 197, 4).

/// The lowest bit of each byte.
const LOW_BITS: u64 = 0x0101_0101_0101_0101;

/// Each of the eight bytes of `lanes` times `by`. The time depends on `by` only.
#[inline(always)]
pub(crate) const fn times(by: u8, lanes: u64) -> u64 {
    let (mut by, mut power, mut product) = (by, lanes, 0);
    while by > 0 {
        if by & 1 == 1 {
            product ^= power;
        }
        // Doubled: what leaves a byte at its top comes back as 0x1b.
        let out = power >> 7 & LOW_BITS;
        power = (power & !(LOW_BITS << 7)) << 1 ^ out ^ out << 1 ^ out << 3 ^ out << 4;
        by >>= 1;
    }
    product
}

/// For factors and places, which are public: looks up tables.
pub(crate) fn product(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    POWERS[usize::from(LOGARITHMS[usize::from(a)]) + usize::from(LOGARITHMS[usize::from(b)])]
}

/// `a / b`, public as well.
///
/// # Panics
/// If `b` is 0.
pub(crate) fn quotient(a: u8, b: u8) -> u8 {
    assert!(b != 0, "distinct places differ by something other than 0");
    if a == 0 {
        return 0;
    }
    let logarithm =
        ORDER + usize::from(LOGARITHMS[usize::from(a)]) - usize::from(LOGARITHMS[usize::from(b)]);
    POWERS[logarithm]
}

/// How many elements other than 0 there are; each is a power of [`GENERATOR`].
const ORDER: usize = 255;
const GENERATOR: u8 = 3;

/// The powers of the generator, twice, so that a sum of two logarithms needs no reduction.
static POWERS: [u8; 2 * ORDER] = logarithms().0;
/// Their exponents; for 0, which has none, it is not used.
static LOGARITHMS: [u8; 256] = logarithms().1;

const fn logarithms() -> ([u8; 2 * ORDER], [u8; 256]) {
    let (mut powers, mut logarithms) = ([0; 2 * ORDER], [0; 256]);
    let (mut exponent, mut power) = (0, 1);
    while exponent < ORDER {
        powers[exponent] = power;
        powers[exponent + ORDER] = power;
        logarithms[power as usize] = exponent as u8;
        power = times(GENERATOR, power as u64) as u8;
        exponent += 1;
    }
    (powers, logarithms)
}

/// For each factor its products with the 16 values of a lower nibble, and of an upper one.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) static NIBBLES: [[[u8; 16]; 2]; 256] = {
    let mut tables = [[[0; 16]; 2]; 256];
    let mut by = 0;
    while by < 256 {
        let mut nibble = 0;
        while nibble < 16 {
            tables[by][0][nibble] = times(by as u8, nibble as u64) as u8;
            tables[by][1][nibble] = times(by as u8, (nibble << 4) as u64) as u8;
            nibble += 1;
        }
        by += 1;
    }
    tables
};

#[cfg(test)]
mod tests {
    use super::{product, quotient, times};

    #[test]
    fn products_as_published() {
        // FIPS 197, 4.2 and 4.2.1.
        assert_eq!(product(0x57, 0x83), 0xc1);
        assert_eq!(product(0x57, 0x13), 0xfe);
        assert_eq!(times(0x57, 0x13_83), 0xfe_c1);
    }

    #[test]
    fn ways_to_multiply_agree() {
        for a in 0..=u8::MAX {
            for b in 0..=u8::MAX {
                let lanes = times(a, u64::from_le_bytes([b, 0, 1, b, 0xff, 0, b, b]));
                let c = product(a, b);
                assert_eq!(
                    lanes.to_le_bytes(),
                    [c, 0, a, c, product(a, 0xff), 0, c, c],
                    "{a} times {b}"
                );
                if b != 0 {
                    assert_eq!(quotient(c, b), a, "{a} times {b} over {b}");
                }
            }
        }
    }
}
