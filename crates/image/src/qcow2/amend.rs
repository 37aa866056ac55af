//! Changes of an image's features: its version and lazy refcounts.
//!
//! Both are fields of the header; everything else stays unchanged. Never changes guest data.

use super::Qcow2Image;
use reactor::error::{Error, Result};

use crate::qcow2::header::compatible;

/// Features to change; `None` keeps the present value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amendment {
    /// Upgrade an image of version 2 to version 3.
    pub upgrade: bool,
    /// Allow postponed refcount updates; only in version 3.
    pub lazy_refcounts: Option<bool>,
}

impl Qcow2Image {
    /// Changes features of the image, durably. Affects no request to the open image; the caller
    /// should close it next.
    ///
    /// An image of version 2 must have been checked before it is upgraded: version 3 assigns a
    /// meaning to bits that are reserved in version 2.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] if the image is read-only; [`Error::INVALID`] if its version lacks
    /// the feature; [`Error::NO_SPACE`] if the longer header does not fit into its cluster; or the
    /// file's error.
    pub async fn amend(&self, amendment: Amendment) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        let mut changed = self.header();
        if amendment.upgrade {
            changed.version = 3;
        }
        if let Some(is_on) = amendment.lazy_refcounts {
            if is_on && changed.version < 3 {
                return Err(Error::INVALID);
            }
            changed.compatible &= !compatible::LAZY_REFCOUNTS;
            if is_on {
                changed.compatible |= compatible::LAZY_REFCOUNTS;
            }
        }
        changed.encode().map_err(|_| Error::NO_SPACE)?;
        let _quiesced = self.quiesce().await?;
        self.update_header(|header| {
            header.version = changed.version;
            header.compatible = changed.compatible;
        })
        .await
    }
}
