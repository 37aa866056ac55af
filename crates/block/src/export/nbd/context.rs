//! Metadata contexts: what BLOCK_STATUS can be asked about ("Metadata querying").
//!
//! There is one, `base:allocation`. A context is a bit of a set, so a session stays a copyable value; a family with
//! several members an export (QEMU's `qemu:dirty-bitmap:NAME`) becomes a range of bits, its names looked up in the
//! export.

/// One kind of status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MetaContext {
    /// Holes and zeroes, with the flags of [`super::proto::state`].
    BaseAllocation,
}

impl MetaContext {
    /// Every context a client may select.
    pub const ALL: [Self; 1] = [Self::BaseAllocation];

    /// The name on the wire: namespace, colon, leaf.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BaseAllocation => "base:allocation",
        }
    }

    /// The number replies carry. Not zero, which LIST_META_CONTEXT uses for "none yet".
    pub const fn id(self) -> u32 {
        self.bit() + 1
    }

    const fn bit(self) -> u32 {
        match self {
            Self::BaseAllocation => 0,
        }
    }

    /// The context with this number.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|context| context.id() == id)
    }

    /// Whether a query of LIST_META_CONTEXT means this context: its name, or its namespace with an empty leaf.
    pub fn is_listed_by(self, query: &str) -> bool {
        query == self.name()
            || query.ends_with(':')
                && self.name().starts_with(query)
                && self.name().find(':') == Some(query.len() - 1)
    }

    /// Whether a query of SET_META_CONTEXT selects this context: only its full name does.
    pub fn is_selected_by(self, query: &str) -> bool {
        query == self.name()
    }
}

/// A set of contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetaContexts(u32);

impl MetaContexts {
    /// No context.
    pub const NONE: Self = Self(0);

    /// Adds a context; false if it was there.
    pub fn insert(&mut self, context: MetaContext) -> bool {
        let bit = 1 << context.bit();
        let added = self.0 & bit == 0;
        self.0 |= bit;
        added
    }

    /// Whether the context is in the set.
    pub const fn contains(self, context: MetaContext) -> bool {
        self.0 & (1 << context.bit()) != 0
    }

    /// How many contexts there are.
    pub const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    /// Whether there is none.
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// The contexts, in the order of their numbers.
    pub fn iter(self) -> impl Iterator<Item = MetaContext> {
        MetaContext::ALL.into_iter().filter(move |&context| self.contains(context))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_lists_but_does_not_select() {
        let context = MetaContext::BaseAllocation;
        assert!(context.is_listed_by("base:"));
        assert!(context.is_listed_by("base:allocation"));
        assert!(context.is_selected_by("base:allocation"));
        for query in ["base:", "base", "", ":", "base:alloc", "qemu:", "base:allocation:"] {
            assert!(!context.is_selected_by(query), "{query}");
        }
        for query in ["base", "", ":", "base:alloc", "qemu:", "base:allocation:", "bas"] {
            assert!(!context.is_listed_by(query), "{query}");
        }
    }

    #[test]
    fn numbers_lead_back_to_their_contexts() {
        for context in MetaContext::ALL {
            assert_eq!(MetaContext::from_id(context.id()), Some(context));
        }
        assert_eq!(MetaContext::from_id(0), None);
        assert_eq!(MetaContext::from_id(u32::MAX), None);
    }

    #[test]
    fn a_set_holds_each_context_once() {
        let mut set = MetaContexts::NONE;
        assert!(set.is_empty());
        assert!(set.insert(MetaContext::BaseAllocation));
        assert!(!set.insert(MetaContext::BaseAllocation));
        assert_eq!(set.iter().collect::<Vec<_>>(), [MetaContext::BaseAllocation]);
        assert_eq!(set.len(), 1);
    }
}
