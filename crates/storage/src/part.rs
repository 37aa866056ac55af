//! A part of a storage as a disk: `offset=1M,size=10M`, as in QEMU's raw format.

use std::{fmt, str::FromStr};

use super::{InvalidOption, options::pairs, spec::parse_size};

/// Position of the disk inside the storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoragePart {
    /// Start of the part, in bytes.
    pub offset: u64,
    /// Size of the part in bytes; `None` means up to the end of the storage.
    pub size: Option<u64>,
}

impl StoragePart {
    /// Size of the disk in a storage of `total_bytes`; 0 if the part begins beyond its end.
    pub(super) fn size_in(self, total_bytes: u64) -> u64 {
        total_bytes.saturating_sub(self.offset).min(self.size.unwrap_or(u64::MAX))
    }
}

impl FromStr for StoragePart {
    type Err = InvalidOption;
    /// Parses `offset=1M,size=10M`, each optional.
    fn from_str(text: &str) -> Result<Self, InvalidOption> {
        let mut part = Self::default();
        for pair in pairs("options", text)? {
            match pair.key {
                "offset" => part.offset = pair.parse(parse_size)?,
                "size" => match pair.parse(parse_size)? {
                    0 => return Err(pair.error("must not be 0 (give a size, e.g. 1G)")),
                    size => part.size = Some(size),
                },
                _ => return Err(pair.unknown("offset, size")),
            }
        }
        Ok(part)
    }
}

/// Formats the part so that [`FromStr`] reads it.
impl fmt::Display for StoragePart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "offset={}", self.offset)?;
        self.size.map_or(Ok(()), |size| write!(f, ",size={size}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Durability, ResizeError, Storage, ZeroOptions};
    use reactor::{buffer::IoBuffer, sim};

    #[test]
    fn parses_qemu_offset_and_size() {
        assert_eq!("offset=1M,size=4K".parse(), Ok(StoragePart { offset: 1 << 20, size: Some(4096) }));
        assert_eq!("size=512".parse(), Ok(StoragePart { offset: 0, size: Some(512) }));
        for (text, message) in [
            ("offset=1M,start=1", "options: start=1: no such key (there are offset, size)"),
            ("size=0", "options: size=0: must not be 0 (give a size, e.g. 1G)"),
            ("offset", "options: offset=: is not of the form key=value"),
        ] {
            assert_eq!(text.parse::<StoragePart>().unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn bytes_around_a_part_are_unchanged() {
        sim::run(1, async {
            let content: Vec<u8> = (0..4096_u32).map(|at| (at % 251) as u8).collect();
            let storage = Storage::with_content(&content).await;
            let part = storage.part(StoragePart { offset: 1000, size: Some(2000) });
            assert_eq!(part.size_bytes(), 2000);
            assert_eq!(part.read_all().await.unwrap(), content[1000..3000]);
            part.write(0, IoBuffer::copy_of(&[7; 10]).into(), Durability::Cached).await.unwrap();
            let zeroes = ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };
            part.write_zeroes(1990, 10, zeroes).await.unwrap();
            part.discard(100, 10).await.unwrap();
            assert_eq!(part.block_status(0, 2000).await.unwrap()[0].length, 2000);
            let refused = part.resize(4096).await;
            assert_eq!(refused, Err(ResizeError::Part { size_bytes: 2000 }));
            let Storage::Wrapped(wrapped) = &part else { unreachable!("a part is a wrapper") };
            let mut expected = content.clone();
            expected[1000..1010].fill(7);
            expected[2990..3000].fill(0);
            expected[1100..1110].fill(0);
            assert_eq!(wrapped.inner().read_all().await.unwrap(), expected);
        });
    }

    #[test]
    fn block_size_of_a_part_follows_its_offset() {
        let parent = Storage::memory(1 << 20).block_size();
        assert!(parent.preferred >= 4096, "{parent:?}");
        for (offset, aligned) in
            [(0, u32::MAX), (1 << 40, u32::MAX), (4096, 4096), (512, 512), (1536, 512), (1000, 8), (7, 1)]
        {
            let part = Storage::memory(1 << 20).part(StoragePart { offset, size: None }).block_size();
            assert_eq!(part.preferred, parent.preferred.min(aligned), "{offset}");
        }
    }

    #[test]
    fn part_without_a_size_extends_to_the_end() {
        sim::run(1, async {
            let part = Storage::memory(4096).part(StoragePart { offset: 1024, size: None });
            assert_eq!(part.size_bytes(), 3072);
            part.resize(7168).await.expect("memory grows");
            assert_eq!((part.size_bytes(), part.refresh_size().await), (7168, Ok(7168)));
            let outside = Storage::memory(4096).part(StoragePart { offset: 5000, size: None });
            assert_eq!(outside.size_bytes(), 0);
        });
    }
}
