//! Compressed clusters: compression and decompression of one cluster of guest data.
//!
//! Data from an image is hostile: a stream may be truncated, damaged, or decompress to gigabytes.
//! Decompression fills exactly one cluster of the caller's memory and allocates no more than a few
//! megabytes.
//!
//! zlib means raw deflate without a header, with a window of 4 KiB, since QEMU's reader accepts no
//! larger one. Arbitrary bytes may follow the stream, because sizes are counted in sectors.
//! Contexts are per thread: creating one costs more than a small cluster.
//!
//! Compressing 64 KiB takes at least a hundred microseconds, decompressing tens of them, and the
//! largest cluster 32 times as long. Callers therefore run it outside the reactor, with
//! [`run_computation`](reactor::run_computation).
//!
//! Source: QEMU's docs/interop/qcow2.rst, "Compressed Clusters" and "Compression type"; the limits
//! of zstd, RFC 8878.

use std::cell::RefCell;

use flate2::{Compress, Decompress, FlushCompress, FlushDecompress, Status};
use zstd::{
    stream::raw::{DParameter, InBuffer, Operation, OutBuffer},
    zstd_safe,
};

use super::{InvalidImage, header::CompressionType};

// Window that QEMU writes, and the largest that it reads: 4 KiB.
const WRITTEN_WINDOW_BITS: u8 = 12;
// Deflate's largest window, to read streams of more generous writers.
const READ_WINDOW_BITS: u8 = 15;
// Window limit of a zstd frame: the 8 MiB that RFC 8878 recommends decoders to support, four of
// the largest clusters.
const ZSTD_WINDOW_BITS: u32 = 23;

thread_local! {
    static INFLATE: RefCell<Option<Decompress>> = const { RefCell::new(None) };
    static DEFLATE: RefCell<Option<Compress>> = const { RefCell::new(None) };
    static ZSTD_READER: RefCell<Option<zstd::stream::raw::Decoder<'static>>> = const { RefCell::new(None) };
    static ZSTD_WRITER: RefCell<Option<zstd::bulk::Compressor<'static>>> = const { RefCell::new(None) };
}

/// Decompresses `data` into `cluster`. Bytes after the end of the stream are ignored.
///
/// # Errors
/// The stream is damaged or does not fill the cluster; for zstd also if it exceeds the cluster.
/// The content of `cluster` is then undefined.
pub fn decompress(kind: CompressionType, data: &[u8], cluster: &mut [u8]) -> Result<(), InvalidImage> {
    match kind {
        CompressionType::Zlib => inflate(data, cluster),
        CompressionType::Zstd => unzstd(data, cluster),
    }
}

/// Compresses a whole cluster; `None` if that saves no space.
pub fn compress(kind: CompressionType, cluster: &[u8]) -> Option<Vec<u8>> {
    // At least one byte less than the cluster, as in QEMU.
    let max_bytes = cluster.len().checked_sub(1)?;
    match kind {
        CompressionType::Zlib => deflate(cluster, max_bytes),
        CompressionType::Zstd => zstd(cluster, max_bytes),
    }
}

fn inflate(data: &[u8], cluster: &mut [u8]) -> Result<(), InvalidImage> {
    INFLATE.with_borrow_mut(|context| {
        let context =
            context.get_or_insert_with(|| Decompress::new_with_window_bits(false, READ_WINDOW_BITS));
        context.reset(false);
        let status = context
            .decompress(data, cluster, FlushDecompress::Finish)
            .map_err(|_| InvalidImage::new("compressed data is damaged"))?;
        let filled = context.total_out();
        // A stream that exceeds the cluster is accepted, as in QEMU.
        if filled != cluster.len() as u64 {
            let why = if status == Status::StreamEnd { "ends" } else { "is truncated" };
            return Err(truncated_input(why, filled, cluster.len()));
        }
        Ok(())
    })
}

fn unzstd(data: &[u8], cluster: &mut [u8]) -> Result<(), InvalidImage> {
    ZSTD_READER.with_borrow_mut(|slot| {
        let context = match slot {
            Some(context) => context,
            None => slot.insert(new_reader()?),
        };
        context.reinit().map_err(|error| context_error(&error))?;
        let length = cluster.len();
        let mut input = InBuffer::around(data);
        let mut output = OutBuffer::around(cluster);
        loop {
            let before = (input.pos(), output.pos());
            let rest = context
                .run(&mut input, &mut output)
                .map_err(|error| InvalidImage::new(format!("compressed data is damaged: {error}")))?;
            match (rest, output.pos() == length) {
                (0, true) => return Ok(()),
                // A cluster may consist of several frames.
                (0, false) if (input.pos(), output.pos()) != before && input.pos() < data.len() => {}
                (0, false) => return Err(truncated_input("ends", output.pos() as u64, length)),
                (_, _) if (input.pos(), output.pos()) != before => {}
                (_, true) => {
                    return Err(InvalidImage::new("compressed data decompresses to more than a cluster"));
                }
                (_, false) => return Err(truncated_input("is truncated", output.pos() as u64, length)),
            }
        }
    })
}

fn new_reader() -> Result<zstd::stream::raw::Decoder<'static>, InvalidImage> {
    let mut context = zstd::stream::raw::Decoder::new().map_err(|error| context_error(&error))?;
    let window = DParameter::WindowLogMax(ZSTD_WINDOW_BITS);
    context.set_parameter(window).map_err(|error| context_error(&error))?;
    Ok(context)
}

fn context_error(error: &std::io::Error) -> InvalidImage {
    InvalidImage::new(format!("zstd cannot be used: {error}"))
}

fn truncated_input(why: &str, filled: u64, length: usize) -> InvalidImage {
    InvalidImage::new(format!("compressed data {why} after {filled} of the cluster's {length} bytes"))
}

fn deflate(cluster: &[u8], max_bytes: usize) -> Option<Vec<u8>> {
    DEFLATE.with_borrow_mut(|context| {
        let context = context.get_or_insert_with(|| {
            Compress::new_with_window_bits(flate2::Compression::default(), false, WRITTEN_WINDOW_BITS)
        });
        context.reset();
        // Space for incompressible data as well: a stream of zlib-rs 0.6 that ran out of space
        // cannot be used again, even after `reset`.
        let mut packed = vec![0; cluster.len() + cluster.len() / 8 + 64];
        let status = context.compress(cluster, &mut packed, FlushCompress::Finish).ok()?;
        let length = usize::try_from(context.total_out()).ok()?;
        packed.truncate(length);
        (status == Status::StreamEnd && length <= max_bytes).then_some(packed)
    })
}

fn zstd(cluster: &[u8], max_bytes: usize) -> Option<Vec<u8>> {
    ZSTD_WRITER.with_borrow_mut(|slot| {
        let context = match slot {
            Some(context) => context,
            None => slot.insert(zstd::bulk::Compressor::new(zstd_safe::CLEVEL_DEFAULT).ok()?),
        };
        let mut packed = vec![0; max_bytes];
        // Running out of space is an error of zstd, and means that the data is incompressible.
        let length = context.compress_to_buffer(cluster, &mut packed[..]).ok()?;
        packed.truncate(length);
        Some(packed)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KINDS: [CompressionType; 2] = [CompressionType::Zlib, CompressionType::Zstd];

    /// Compressible text, with repetitions both inside and outside zlib's window.
    fn text(length: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(7);
        let lines: Vec<String> = (0..400).map(|line| format!("{line} {:x}\n", random.u64(..))).collect();
        let mut bytes = Vec::new();
        while bytes.len() < length {
            bytes.extend(lines[random.usize(..lines.len())].as_bytes());
        }
        bytes.truncate(length);
        bytes
    }

    #[test]
    fn incompressible_data_is_not_compressed() {
        let mut random_bytes = vec![0; 65536];
        fastrand::Rng::with_seed(1).fill(&mut random_bytes);
        for kind in KINDS {
            assert_eq!(compress(kind, &random_bytes), None);
            assert_eq!(compress(kind, &[]), None);
        }
    }

    #[test]
    fn incompressible_data_leaves_no_state() {
        let mut random = fastrand::Rng::with_seed(1);
        for kind in KINDS {
            for length in [512, 4096, 16384] {
                for _ in 0..300 {
                    let mut random_bytes = vec![0; length];
                    random.fill(&mut random_bytes);
                    assert_eq!(compress(kind, &random_bytes), None);
                    let packed = compress(kind, &text(length)).expect("text shrinks");
                    let mut unpacked = vec![0; length];
                    decompress(kind, &packed, &mut unpacked).expect("it was just packed");
                    assert!(unpacked == text(length));
                }
            }
        }
    }

    #[test]
    fn short_long_and_truncated_streams_are_rejected() {
        for kind in KINDS {
            let packed = compress(kind, &text(8192)).expect("text shrinks");
            let message = decompress(kind, &packed, &mut [0; 16384]).expect_err("too short").to_string();
            assert!(message.contains("ends after 8192 of the cluster's 16384"), "{message}");
            let error = decompress(kind, &packed[..packed.len() / 2], &mut [0; 8192]).expect_err("cut");
            assert!(error.to_string().contains("is truncated"), "{error}");
            let long = decompress(kind, &packed, &mut [0; 4096]);
            assert_eq!(long.is_ok(), kind == CompressionType::Zlib, "{long:?}");
            assert!(decompress(kind, &[], &mut [0; 512]).is_err());
        }
    }

    #[test]
    fn zstd_window_is_bounded() {
        // Magic number, no content size, window of 2^31 bytes, then an empty last block.
        let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x00, 0xa8, 0x01, 0x00, 0x00];
        let message =
            decompress(CompressionType::Zstd, &frame, &mut [0; 65536]).expect_err("too large").to_string();
        assert!(message.contains("too much memory"), "{message}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn compressed_data_survives_trailing_bytes(
            bits in 9_u32..=17,
            pieces in proptest::collection::vec((any::<u8>(), 1_usize..3000), 1..200),
            behind in proptest::collection::vec(any::<u8>(), 0..600),
        ) {
            let mut cluster: Vec<u8> =
                pieces.iter().flat_map(|&(byte, count)| std::iter::repeat_n(byte, count)).collect();
            cluster.resize(1 << bits, 0);
            for kind in KINDS {
                let Some(mut packed) = compress(kind, &cluster) else { continue };
                prop_assert!(packed.len() < cluster.len());
                packed.extend(&behind);
                let mut unpacked = vec![0xee; cluster.len()];
                prop_assert_eq!(decompress(kind, &packed, &mut unpacked), Ok(()));
                prop_assert_eq!(&unpacked, &cluster);
            }
        }

        #[test]
        fn damaged_input_only_fails(
            noise in proptest::collection::vec(any::<u8>(), 0..2000),
            at in any::<proptest::sample::Index>(),
            byte in any::<u8>(),
        ) {
            for kind in KINDS {
                let _ = decompress(kind, &noise, &mut [0; 4096]);
                let mut packed = compress(kind, &text(4096)).expect("text shrinks");
                let at = at.index(packed.len());
                packed[at] = byte;
                let _ = decompress(kind, &packed, &mut [0; 4096]);
            }
        }
    }
}
