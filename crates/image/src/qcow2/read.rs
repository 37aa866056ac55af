//! Reads: pieces from the file, from the backing file, or zeroes.

use std::borrow::Cow;

use super::{
    InvalidImage, Qcow2Image, compress,
    lookup::{GuestMapping, MappedRun},
    luks::SECTOR_BYTES,
};
use reactor::{
    buffer::{IoBuffer, ReadTarget, Segments},
    error::{Error, Result},
};

// Unit of encryption.
const SECTOR: u64 = SECTOR_BYTES as u64;

impl Qcow2Image {
    /// Reads `length` bytes at `offset`, which must be inside the disk.
    ///
    /// # Errors
    /// Errors of the file; [`Error::IO`] where the image is corrupt.
    pub async fn read(&self, offset: u64, length: usize) -> Result<Segments> {
        self.read_to(offset, ReadTarget::Anywhere(length)).await
    }

    /// Like [`Self::read`], into the memory that `target` names.
    pub(crate) async fn read_to(&self, offset: u64, target: ReadTarget) -> Result<Segments> {
        let _guard = self.gate.enter().await;
        // Checked under the guard: a resize waits until no request holds one.
        if !self.is_inside(offset, target.len() as u64) {
            return Err(Error::INVALID);
        }
        match self.current() {
            Cow::Borrowed(_) => self.read_inside(offset, target).await,
            // Boxed: the unusual path must not enlarge the future of every read.
            Cow::Owned(image) => Box::pin(async move { image.read_inside(offset, target).await }).await,
        }
    }

    /// Like [`Self::read_to`], for callers that hold a guard of the gate.
    pub(super) async fn read_inside(&self, offset: u64, target: ReadTarget) -> Result<Segments> {
        let length = target.len() as u64;
        if length == 0 {
            return Ok(Segments::default());
        }
        let first = self.lookup(offset, length).await?;
        if first.length == length {
            return self.read_piece(offset, first, target).await;
        }
        Box::pin(self.read_pieces(offset, target, first)).await
    }

    /// Reads several pieces concurrently: the first one here, the rest in spawned tasks. Awaits
    /// all of them even after an error, because the kernel may write to the guest's memory until
    /// they complete.
    async fn read_pieces(&self, offset: u64, mut target: ReadTarget, first: MappedRun) -> Result<Segments> {
        let mut tasks = Vec::new();
        let first_target = target.split_front(first.length as usize);
        let mut at = offset + first.length;
        let mut failed = Ok(());
        while !target.is_empty() {
            let piece = match self.lookup(at, target.len() as u64).await {
                Ok(piece) => piece,
                Err(error) => {
                    failed = Err(error);
                    break;
                }
            };
            let part = target.split_front(piece.length as usize);
            let image = self.clone();
            // The tasks end before this future does, and its caller holds the guard of the gate.
            let reading = async move { image.read_piece(at, piece, part).await };
            at += piece.length;
            tasks.push(if reactor::is_in_background() {
                reactor::spawn_joinable(reactor::in_background(reading))
            } else {
                reactor::spawn_joinable(reading)
            });
        }
        let mut data = match failed {
            Ok(()) => self.read_piece(offset, first, first_target).await,
            Err(error) => Err(error),
        };
        for task in tasks {
            let read = task.await;
            data = data.and_then(|mut data| {
                data.append(read?);
                Ok(data)
            });
        }
        data
    }

    async fn read_piece(&self, offset: u64, piece: MappedRun, target: ReadTarget) -> Result<Segments> {
        match piece.mapping {
            GuestMapping::Data { host, .. } => self.read_data(host, target).await,
            GuestMapping::Zero { .. } => Ok(target.zeroes()),
            GuestMapping::Unallocated => Box::pin(self.read_backing(offset, target)).await,
            GuestMapping::Compressed { offset: host, length: most } => {
                Box::pin(self.read_compressed(offset, target, host, most)).await
            }
        }
    }

    /// Reads guest data from the file that holds it, and decrypts it.
    async fn read_data(&self, host: u64, target: ReadTarget) -> Result<Segments> {
        let Some(cipher) = &self.cipher else { return self.read_stored(host, target).await };
        // A sector can only be decrypted as a whole.
        let length = target.len();
        let first = host & !(SECTOR - 1);
        let end = (host + length as u64).next_multiple_of(SECTOR);
        let mut sectors =
            self.read_stored(first, ReadTarget::Anywhere((end - first) as usize)).await?.joined();
        cipher.decrypt(first / SECTOR, &mut sectors)?;
        sectors.advance((host - first) as usize);
        sectors.truncate(length);
        Ok(target.accept(sectors))
    }

    async fn read_stored(&self, host: u64, mut target: ReadTarget) -> Result<Segments> {
        let storage = self.storage();
        // The file may end inside its last cluster; the rest reads as zeroes.
        let available = storage.size_bytes().saturating_sub(host).min(target.len() as u64) as usize;
        if available == target.len() {
            return storage.read_into(host, target.into_memory()).await;
        }
        let front = target.split_front(available);
        let mut data = Segments::default();
        if available > 0 {
            data = storage.read_into(host, front.into_memory()).await?;
        }
        data.append(target.zeroes());
        Ok(data)
    }

    /// Reads from the backing file; bytes beyond its end are zeroes.
    async fn read_backing(&self, offset: u64, mut target: ReadTarget) -> Result<Segments> {
        let available = self.backing_bytes(offset).min(target.len() as u64) as usize;
        // The backing file was changed by another process: fail instead of mixing old and new
        // data.
        if available > 0 && self.is_backing_changed() {
            return Err(Error::IO);
        }
        let mut data = Segments::default();
        if let Some(backing) = self.backing().filter(|_| available > 0) {
            data = backing.read_to(offset, target.split_front(available)).await?;
        }
        if !target.is_empty() {
            data.append(target.zeroes());
        }
        Ok(data)
    }

    /// Number of bytes that the backing file has from `offset` on.
    pub(super) fn backing_bytes(&self, offset: u64) -> u64 {
        self.backing().map_or(0, |backing| backing.size_bytes().saturating_sub(offset))
    }

    async fn read_compressed(
        &self,
        offset: u64,
        target: ReadTarget,
        host: u64,
        max_bytes: u64,
    ) -> Result<Segments> {
        let cluster_bytes = 1_usize << self.shape.cluster_bits;
        // The file may end inside the last sector of compressed data.
        let available = self.file.size_bytes().saturating_sub(host).min(max_bytes);
        if available == 0 {
            let message = format!("compressed data at {host:#x} lies beyond the end of the file");
            return Err(self.file.report_invalid(&InvalidImage::new(message)));
        }
        let packed = self.file.storage().read(host, IoBuffer::new(available as usize)).await?.to_vec();
        let kind = self.compression;
        // On another thread, because decompression would delay all disks of this worker.
        let unpacked = reactor::run_computation(move || {
            let mut cluster = vec![0; cluster_bytes];
            compress::decompress(kind, &packed, &mut cluster).map(|()| cluster)
        });
        let cluster = unpacked.await.map_err(|invalid| self.file.report_invalid(&invalid))?;
        let offset_in_cluster = (offset as usize) & (cluster_bytes - 1);
        let end = offset_in_cluster + target.len();
        Ok(target.copy_of(&cluster[offset_in_cluster..end]))
    }

    /// True if the whole range reads as zeroes according to this image's own metadata; does not
    /// inspect backing files.
    pub(super) async fn is_zero(&self, mut offset: u64, mut length: u64) -> Result<bool> {
        while length > 0 {
            let piece = self.lookup(offset, length).await?;
            let is_zero = match piece.mapping {
                GuestMapping::Zero { .. } => true,
                GuestMapping::Unallocated => self.backing_bytes(offset) == 0,
                GuestMapping::Data { .. } | GuestMapping::Compressed { .. } => false,
            };
            if !is_zero {
                return Ok(false);
            }
            offset += piece.length;
            length -= piece.length;
        }
        Ok(true)
    }
}
