//! The numbers of qcow2's and LUKS's metadata: of whole bytes, the high one first.
//!
//! Callers have checked that the bytes are there.

/// The `N` bytes at `at`.
pub(super) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

/// The number of two bytes at `at`.
pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(array(bytes, at))
}

/// The number of four bytes at `at`.
pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

/// The number of eight bytes at `at`.
pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(array(bytes, at))
}

/// A table's entries of eight bytes.
pub(super) fn words(bytes: &[u8]) -> impl ExactSizeIterator<Item = u64> {
    bytes.chunks_exact(8).map(|word| u64_at(word, 0))
}
