//! Values that the tests of several modules start from.

use krypton_helm::releases::Status;
use krypton_helm::releases::revision::Revision;

/// Returns a revision without Krypton's labels.
pub(crate) fn foreign_revision(revision: u32, status: Status) -> Revision {
    Revision {
        revision,
        status,
        fingerprint: None,
        owner_uid: None,
        owner_namespace: None,
        run: None,
        rolled_back_by: None,
        uid: format!("secret-{revision}"),
        resource_version: revision.to_string(),
        created: None,
    }
}
