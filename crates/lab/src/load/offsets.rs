//! Offsets of requests: sequential, in strides, backward, random, or random with hot spots. A
//! request never extends past the end.

use std::cell::{Cell, RefCell};

use super::zipf::Zipf;

/// Wraps to the image's start before a request would extend past its end; reversed for backward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OffsetPattern {
    /// In bytes.
    pub(crate) offset: u64,
    /// In bytes; not 0.
    pub(crate) step_bytes: u64,
    pub(crate) last: u64,
    pub(crate) backward: bool,
    /// Seed of random steps after `offset`; `None` for sequential requests.
    pub(crate) random: Option<u64>,
    /// Consecutive requests at each random place; not 0.
    pub(crate) run: u64,
}

impl OffsetPattern {
    fn last_step(&self) -> u64 {
        (self.last - self.offset) / self.step_bytes
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Locality {
    #[default]
    Even,
    /// The exponent; above 0, finite.
    Zipf(f64),
    /// Percentage of the requests that goes to the first `places` percent; both 1 to 99.
    Hot { requests: u8, places: u8 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JobPart {
    pub(crate) number: u32,
    /// Number of parts; not 0.
    pub(crate) count: u32,
}

impl JobPart {
    pub(crate) const WHOLE: Self = Self { number: 0, count: 1 };

    /// Seed of this part; that of the first part is `seed` itself.
    pub(super) fn seed(self, seed: u64) -> u64 {
        // The 64-bit golden ratio, as in SplitMix64 (Steele and others, OOPSLA 2014).
        seed.wrapping_add(u64::from(self.number).wrapping_mul(0x9E37_79B9_7F4A_7C15))
    }
}

#[derive(Debug)]
pub(super) struct OffsetGenerator {
    pattern: OffsetPattern,
    block_bytes: u64,
    random: RefCell<fastrand::Rng>,
    draw: RandomBlocks,
}

#[derive(Debug)]
pub(crate) enum RandomBlocks {
    Even {
        count: u64,
    },
    Zipf(Box<Zipf>),
    /// `percent` of the draws are below `cold`, which is above 0.
    Hot {
        percent: u8,
        cold: u64,
        count: u64,
    },
}

impl RandomBlocks {
    /// `count` is not 0; the seed determines which blocks are hot by Zipf's law.
    pub(crate) fn new(count: u64, locality: Locality, seed: u64) -> Self {
        match locality {
            Locality::Even => Self::Even { count },
            Locality::Zipf(theta) => Self::Zipf(Box::new(Zipf::new(count, theta, seed))),
            Locality::Hot { requests, places } => {
                // At least one hot block, and at least one cold one unless there is only one block.
                let cold = u128::from(count - 1) * u128::from(places) / 100 + 1;
                Self::Hot { percent: requests, cold: u64::try_from(cold).unwrap_or(u64::MAX), count }
            }
        }
    }

    pub(crate) fn block(&self, random: &mut fastrand::Rng) -> u64 {
        match *self {
            Self::Even { count } => random.u64(..count),
            Self::Zipf(ref zipf) => zipf.draw(random),
            Self::Hot { percent, cold, count } => {
                let hot = random.u8(0..100) < percent;
                if hot || cold == count { random.u64(..cold) } else { random.u64(cold..count) }
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct LoadReader {
    next_offset: Cell<u64>,
    left_of_run: Cell<u64>,
    pub(super) answered: Cell<u64>,
}

impl OffsetGenerator {
    /// Every part has the same hot blocks, but draws in its own order.
    pub(super) fn new(pattern: OffsetPattern, block_bytes: u64, locality: Locality, part: JobPart) -> Self {
        let seed = pattern.random.unwrap_or_default();
        let draw = RandomBlocks::new(pattern.last_step().saturating_add(1), locality, seed);
        let random = RefCell::new(fastrand::Rng::with_seed(part.seed(seed)));
        Self { pattern, block_bytes, random, draw }
    }

    /// Readers start at equal distances over all parts.
    pub(super) fn readers(&self, count: u32, part: JobPart) -> Vec<LoadReader> {
        let OffsetPattern { offset, step_bytes, .. } = self.pattern;
        let all = u64::from(count) * u64::from(part.count);
        // A multiple of the step, so that random and sequential offsets have the same alignment.
        let distance = self.pattern.last_step() / all * step_bytes;
        let first = u64::from(part.number) * u64::from(count);
        let reader = |number| LoadReader {
            next_offset: Cell::new(offset + (first + u64::from(number)) * distance),
            left_of_run: Cell::new(0),
            answered: Cell::new(0),
        };
        (0..count).map(reader).collect()
    }

    pub(super) fn next(&self, reader: &LoadReader) -> u64 {
        let OffsetPattern { offset, step_bytes, last, backward, random, run } = self.pattern;
        let mut place = reader.next_offset.get();
        if random.is_some() {
            if reader.left_of_run.get() == 0 {
                place = offset + self.draw.block(&mut self.random.borrow_mut()) * step_bytes;
                reader.left_of_run.set(run);
            }
            reader.left_of_run.set(reader.left_of_run.get() - 1);
        }
        // The end of the accessible range, at which sequential offsets wrap.
        let size = last + self.block_bytes;
        // Backward wraps to the highest offset that is aligned to the step.
        let next = if backward {
            place.checked_sub(step_bytes).unwrap_or(last - (last - offset) % step_bytes)
        } else {
            let next = (u128::from(place) + u128::from(step_bytes)) % u128::from(size);
            u64::try_from(next).ok().filter(|&next| next <= last).unwrap_or(0)
        };
        reader.next_offset.set(next);
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCKS: u64 = 256;

    fn course(locality: Locality, part: JobPart) -> OffsetGenerator {
        let last = (BLOCKS - 1) * 4096;
        let pattern =
            OffsetPattern { offset: 0, step_bytes: 4096, last, backward: false, random: Some(5), run: 1 };
        OffsetGenerator::new(pattern, 4096, locality, part)
    }

    fn blocks(course: &OffsetGenerator, count: usize) -> Vec<u64> {
        let reader = &course.readers(1, JobPart::WHOLE)[0];
        (0..count).map(|_| course.next(reader) / 4096).collect()
    }

    #[test]
    fn hot_spot_gets_its_share_and_every_block_is_used() {
        let hot = Locality::Hot { requests: 90, places: 10 };
        let drawn = blocks(&course(hot, JobPart::WHOLE), 100_000);
        let hits = drawn.iter().filter(|&&block| block < 26).count();
        assert!((89_500..90_500).contains(&hits), "{hits}");
        assert!((0..BLOCKS).all(|block| drawn.contains(&block)));
    }

    #[test]
    fn jobs_share_hot_blocks_but_not_their_sequence() {
        let hottest = |number| {
            let drawn = blocks(&course(Locality::Zipf(1.2), JobPart { number, count: 2 }), 10_000);
            let count = |block| drawn.iter().filter(|&&other| other == block).count();
            (drawn[..20].to_vec(), (0..BLOCKS).max_by_key(|&block| count(block)))
        };
        let (one, other) = (hottest(0), hottest(1));
        assert_eq!(one.1, other.1);
        assert_ne!(one.0, other.0);
    }

    #[test]
    fn single_block_disk_has_one_offset() {
        for locality in [Locality::Even, Locality::Zipf(1.0), Locality::Hot { requests: 50, places: 99 }] {
            let pattern = OffsetPattern {
                offset: 0,
                step_bytes: 4096,
                last: 0,
                backward: false,
                random: Some(1),
                run: 1,
            };
            let course = OffsetGenerator::new(pattern, 4096, locality, JobPart::WHOLE);
            assert_eq!(blocks(&course, 10), [0; 10]);
        }
    }

    #[test]
    fn parts_start_at_the_offsets_of_as_many_readers() {
        let begins = |readers, part| {
            let readers = course(Locality::Even, part).readers(readers, part);
            readers.iter().map(|reader| reader.next_offset.get()).collect::<Vec<_>>()
        };
        let parts = [0, 1].map(|number| begins(2, JobPart { number, count: 2 })).concat();
        assert_eq!(parts, begins(4, JobPart::WHOLE));
    }
}
