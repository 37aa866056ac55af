//! Where the bytes live: memory, or a regular file opened with O_DIRECT.
//!
//! Memory needs no awaiting; the file uses io_uring. Callers check ranges against [`Storage::size`]
//! and [`Storage::block_size`] first.

use std::cell::RefCell;
use std::io;

use compio::buf::BufResult;
use compio::fs::{File, OpenOptions};
use compio::io::{AsyncReadAtExt, AsyncWriteAtExt};

use crate::buffer::Buffer;

/// From Linux's asm-generic/fcntl.h.
#[cfg(target_arch = "x86_64")]
const O_DIRECT: i32 = 0o40000;
/// From Linux's arch/arm64/include/uapi/asm/fcntl.h.
#[cfg(target_arch = "aarch64")]
const O_DIRECT: i32 = 0o200000;
/// O_DIRECT's alignment in bytes on the disks this is run on.
const SECTOR: u32 = 512;

pub(crate) enum Storage {
    Memory(RefCell<Vec<u8>>),
    /// A file and its size in bytes.
    File(File, u64),
}

/// An operation's result, and its buffer back.
type Done = (io::Result<()>, Buffer);

impl Storage {
    /// Opens `memory:SIZE` (with K, M, G or T) or a path.
    pub(crate) async fn open(image: &str) -> io::Result<Self> {
        let named =
            |error: io::Error, advice| io::Error::new(error.kind(), format!("{image}: {error} ({advice})"));
        if let Some(size) = image.strip_prefix("memory:") {
            let size = parse_size(size)
                .ok_or_else(|| named(io::ErrorKind::InvalidInput.into(), "a size is like 256M"))?;
            let mut memory = Vec::new();
            memory.try_reserve_exact(size).map_err(|error| named(error.into(), "choose a smaller size"))?;
            memory.resize(size, 0);
            return Ok(Self::Memory(RefCell::new(memory)));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(O_DIRECT)
            .open(image)
            .await
            .map_err(|error| named(error, "it must be on a file system with O_DIRECT"))?;
        let size = file.metadata().await?.len();
        if size == 0 || !size.is_multiple_of(SECTOR.into()) {
            return Err(named(
                io::ErrorKind::InvalidInput.into(),
                "its size must be a multiple of 512 bytes",
            ));
        }
        Ok(Self::File(file, size))
    }

    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Memory(memory) => memory.borrow().len() as u64,
            Self::File(_, size) => *size,
        }
    }

    /// The alignment of offsets and lengths, in bytes.
    pub(crate) fn block_size(&self) -> u32 {
        match self {
            Self::Memory(_) => 1,
            Self::File(..) => SECTOR,
        }
    }

    pub(crate) async fn read(&self, mut buffer: Buffer, offset: u64, length: usize) -> Done {
        match self {
            Self::Memory(memory) => {
                let bytes = &memory.borrow()[offset as usize..][..length];
                buffer.payload_mut(length).copy_from_slice(bytes);
                (Ok(()), buffer)
            }
            Self::File(file, _) => {
                let BufResult(outcome, view) = file.read_exact_at(buffer.into_payload(length), offset).await;
                (outcome, Buffer::from_view(view))
            }
        }
    }

    pub(crate) async fn write(&self, mut buffer: Buffer, offset: u64, length: usize) -> Done {
        match self {
            Self::Memory(memory) => {
                let bytes = buffer.payload_mut(length);
                memory.borrow_mut()[offset as usize..][..length].copy_from_slice(bytes);
                (Ok(()), buffer)
            }
            Self::File(file, _) => {
                let mut file = file;
                let BufResult(outcome, view) = file.write_all_at(buffer.into_payload(length), offset).await;
                (outcome, Buffer::from_view(view))
            }
        }
    }

    pub(crate) async fn flush(&self) -> io::Result<()> {
        match self {
            Self::Memory(_) => Ok(()),
            Self::File(file, _) => file.sync_data().await,
        }
    }
}

/// Such as `4096`, `64K` or `1G`.
fn parse_size(text: &str) -> Option<usize> {
    let shift = match text.chars().last()? {
        'K' => 10,
        'M' => 20,
        'G' => 30,
        'T' => 40,
        _ => 0,
    };
    let digits = if shift == 0 { text } else { &text[..text.len() - 1] };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift).filter(|&size| size > 0)
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes() {
        let cases = [
            ("4096", Some(4096)),
            ("64K", Some(64 << 10)),
            ("1G", Some(1 << 30)),
            ("0", None),
            ("K", None),
            ("", None),
            ("-1", None),
            ("1é", None),
            ("99999999T", None),
        ];
        for (text, size) in cases {
            assert_eq!(parse_size(text), size, "{text:?}");
        }
    }
}
