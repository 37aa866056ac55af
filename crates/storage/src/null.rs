//! A disk that discards writes and reads zeroes: measures the cost of everything above storage. Own
//! buffers are zeroed, because they still hold another client's data; guest memory is left
//! unchanged, as by QEMU's `null-co`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::{
    BlockSize, Durability, Extent, ZeroOptions,
    resize::{self, ResizeError},
};
use reactor::{buffer::Segments, error::Result};

/// A null disk.
#[derive(Debug)]
pub struct NullStorage {
    size_bytes: AtomicU64,
}

impl NullStorage {
    /// Creates a disk of `size_bytes`.
    pub fn new(size_bytes: u64) -> Self {
        Self { size_bytes: AtomicU64::new(size_bytes) }
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Relaxed)
    }

    pub(super) async fn refresh_size(&self) -> Result<u64> {
        Ok(self.size_bytes())
    }

    pub(super) fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        resize::check_size(size_bytes, 1)?;
        self.size_bytes.store(size_bytes, Relaxed);
        Ok(())
    }

    pub(super) fn description(&self) -> String {
        format!("null, {} bytes", self.size_bytes())
    }

    pub(super) fn read_only(&self) -> bool {
        false
    }

    pub(super) fn block_size(&self) -> BlockSize {
        BlockSize { minimum: 1, preferred: 4096 }
    }

    pub(super) fn can_zero_fast(&self) -> bool {
        true
    }

    pub(super) async fn read(&self, _offset: u64, mut target: Segments) -> Result<Segments> {
        target.zero_own();
        Ok(target)
    }

    pub(super) async fn write(&self, _offset: u64, _data: Segments, _durability: Durability) -> Result<()> {
        Ok(())
    }

    pub(super) async fn flush(&self) -> Result<()> {
        Ok(())
    }

    pub(super) async fn write_zeroes(&self, _offset: u64, _length: u64, _options: ZeroOptions) -> Result<()> {
        Ok(())
    }

    pub(super) async fn discard(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }

    pub(super) async fn block_status(&self, _offset: u64, length: u64) -> Result<Vec<Extent>> {
        Ok(vec![Extent { length, hole: true, zero: true }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use reactor::{buffer::IoBuffer, sim};

    #[test]
    fn reads_zeroes_even_into_a_used_buffer() {
        sim::run(1, async {
            let null = NullStorage::new(1 << 40);
            let mut used = IoBuffer::new(4096);
            used.fill(7);
            let read = null.read(12_345, used.into()).await.expect("null never fails");
            assert!(read.to_vec().iter().all(|&byte| byte == 0));
        });
    }
}
