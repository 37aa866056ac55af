//! Metadata contexts, the subjects of BLOCK_STATUS ("Metadata querying").
//!
//! Contexts are `base:allocation`, `qemu:allocation-depth`, and `qemu:dirty-bitmap:NAME` for each
//! bitmap that an export offers. A context is one bit of a set; the export has the bitmaps' names.

use std::{borrow::Cow, sync::Arc};

/// Largest number of bitmaps of an export.
pub const MAX_BITMAPS: usize = 31;
/// Number of contexts before those of bitmaps.
const OTHERS: u32 = 2;

/// Prefix of a bitmap's context name (QEMU's docs/interop/nbd.txt).
const BITMAPS: &str = "qemu:dirty-bitmap:";

/// One kind of status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MetaContext {
    /// Holes and zeroes, with the flags of [`super::proto::state`].
    BaseAllocation,
    /// Level of the backing chain at which a range is allocated: 0 none, 1 the image, 2 its backing
    /// file and so on (QEMU's docs/interop/nbd.txt).
    AllocationDepth,
    /// The export's bitmap of this index, below [`MAX_BITMAPS`]: flag 1 where it is dirty.
    DirtyBitmap(u8),
}

impl MetaContext {
    /// All contexts of an export with this number of bitmaps.
    pub fn of_export(bitmaps: usize) -> impl Iterator<Item = Self> {
        (0..OTHERS + bitmaps.min(MAX_BITMAPS) as u32).map(Self::of_bit)
    }

    /// Name on the wire: namespace, colon, leaf. `bitmaps` are the export's.
    pub fn name(self, bitmaps: &[Arc<str>]) -> Cow<'static, str> {
        match self {
            Self::BaseAllocation => Cow::Borrowed("base:allocation"),
            Self::AllocationDepth => Cow::Borrowed("qemu:allocation-depth"),
            Self::DirtyBitmap(index) => {
                let name = bitmaps.get(usize::from(index)).map_or("", |name| name);
                Cow::Owned(format!("{BITMAPS}{name}"))
            }
        }
    }

    /// Number in replies. Never zero, which LIST_META_CONTEXT uses for "none yet".
    pub const fn id(self) -> u32 {
        self.bit() + 1
    }

    const fn bit(self) -> u32 {
        match self {
            Self::BaseAllocation => 0,
            Self::AllocationDepth => 1,
            Self::DirtyBitmap(index) => OTHERS + index as u32,
        }
    }

    fn of_bit(bit: u32) -> Self {
        match bit {
            0 => Self::BaseAllocation,
            1 => Self::AllocationDepth,
            _ => Self::DirtyBitmap((bit - OTHERS) as u8),
        }
    }

    /// Context with this number.
    pub fn from_id(id: u32) -> Option<Self> {
        (1..=OTHERS + MAX_BITMAPS as u32).contains(&id).then(|| Self::of_bit(id - 1))
    }

    /// True if a query of LIST_META_CONTEXT matches this name: the name itself, its namespace with
    /// an empty leaf, or the prefix of all bitmaps.
    pub fn is_listed_by(name: &str, query: &str) -> bool {
        // A query may name a namespace with an empty leaf, but no prefix within a leaf, except that
        // of bitmaps, which QEMU treats like a namespace.
        let is_namespace = query.ends_with(':') && name.starts_with(query);
        query == name || is_namespace && (name.find(':') == Some(query.len() - 1) || query == BITMAPS)
    }
}

/// A set of metadata contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetaContexts(u64);

impl MetaContexts {
    /// No context.
    pub const NONE: Self = Self(0);

    /// Adds a context; false if the set already had it.
    pub fn insert(&mut self, context: MetaContext) -> bool {
        let bit = 1 << context.bit();
        let added = self.0 & bit == 0;
        self.0 |= bit;
        added
    }

    /// True if the context is in the set.
    pub const fn contains(self, context: MetaContext) -> bool {
        self.0 & (1 << context.bit()) != 0
    }

    /// Number of contexts in the set.
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// True if the set has no context.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The contexts in ascending order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = MetaContext> {
        MetaContext::of_export(MAX_BITMAPS).filter(move |&context| self.contains(context))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_lists_contexts_but_selects_none() {
        let bitmaps = ["b0".into()];
        let names: Vec<_> = MetaContext::of_export(1).map(|context| context.name(&bitmaps)).collect();
        assert_eq!(names, ["base:allocation", "qemu:allocation-depth", "qemu:dirty-bitmap:b0"]);
        let listed =
            |query: &str| names.iter().map(|name| MetaContext::is_listed_by(name, query)).collect::<Vec<_>>();
        assert_eq!(listed("base:"), [true, false, false]);
        assert_eq!(listed("base:allocation"), [true, false, false]);
        assert_eq!(listed("qemu:"), [false, true, true]);
        assert_eq!(listed("qemu:dirty-bitmap:"), [false, false, true]);
        assert_eq!(listed("qemu:dirty-bitmap:b0"), [false, false, true]);
        for query in
            ["base", "", ":", "base:alloc", "base:allocation:", "bas", "qemu:dirty", "qemu:dirty-bitmap:b"]
        {
            assert_eq!(listed(query), [false; 3], "{query}");
        }
    }

    #[test]
    fn numbers_lead_back_to_their_contexts() {
        for context in MetaContext::of_export(100) {
            assert_eq!(MetaContext::from_id(context.id()), Some(context));
        }
        assert_eq!(MetaContext::of_export(100).count(), 33);
        for id in [0, 34, u32::MAX] {
            assert_eq!(MetaContext::from_id(id), None);
        }
    }

    #[test]
    fn a_set_holds_each_context_once() {
        let mut set = MetaContexts::NONE;
        assert!(set.is_empty());
        assert!(set.insert(MetaContext::BaseAllocation));
        assert!(!set.insert(MetaContext::BaseAllocation));
        assert!(set.insert(MetaContext::DirtyBitmap(30)));
        assert_eq!(
            set.iter().collect::<Vec<_>>(),
            [MetaContext::BaseAllocation, MetaContext::DirtyBitmap(30)]
        );
        assert_eq!(set.len(), 2);
    }
}
