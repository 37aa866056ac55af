//! Entries of a refcount block, 1 to 64 bits wide.
//!
//! Entries of less than a byte are packed from the least significant bit; entries of two bytes or
//! more are big-endian.
//!
//! Source: QEMU's docs/interop/qcow2.rst, "Host cluster management".

/// Maximum of an entry of `1 << order` bits; `order` is at most 6.
pub(super) fn max_refcount(order: u32) -> u64 {
    u64::MAX >> (64 - (1_u32 << order))
}

/// Number of entries in a block of `block_bytes`.
pub(super) fn entry_count(block_bytes: u64, order: u32) -> u64 {
    (block_bytes * 8) >> order
}

/// Entry `index`, which must be inside the block.
pub(super) fn get(block: &[u8], order: u32, index: usize) -> u64 {
    if order < 3 {
        let at = index << order;
        return u64::from(block[at / 8] >> (at % 8)) & max_refcount(order);
    }
    let bytes = 1 << (order - 3);
    block[index * bytes..][..bytes].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Sets entry `index` to a value that must fit.
pub(super) fn put(block: &mut [u8], order: u32, index: usize, value: u64) {
    if order < 3 {
        let at = index << order;
        let (byte, mask) = (&mut block[at / 8], max_refcount(order) as u8);
        *byte = *byte & !(mask << (at % 8)) | (value as u8 & mask) << (at % 8);
        return;
    }
    let bytes = 1 << (order - 3);
    block[index * bytes..][..bytes].copy_from_slice(&value.to_be_bytes()[8 - bytes..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_every_width_are_independent() {
        for order in 0..=6 {
            let mut block = vec![0; 512];
            let value = |index: u64| {
                if index.is_multiple_of(3) { max_refcount(order) } else { index & max_refcount(order) }
            };
            for index in 0..entry_count(512, order) {
                put(&mut block, order, index as usize, value(index));
            }
            for index in 0..entry_count(512, order) {
                assert_eq!(get(&block, order, index as usize), value(index), "order {order}, number {index}");
            }
        }
    }

    #[test]
    fn entries_are_in_the_specified_order() {
        let mut block = vec![0; 512];
        put(&mut block, 0, 9, 1);
        assert_eq!(block[..2], [0, 2]);
        put(&mut block, 4, 1, 0x1234);
        assert_eq!(block[..4], [0, 2, 0x12, 0x34]);
    }
}
