//! A revision of a release, as read from its Secret's metadata.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::labels::{
    FINGERPRINT_LABEL, OWNER_NAMESPACE_LABEL, OWNER_UID_LABEL, ROLLBACK_LABEL, RUN_LABEL,
    ReleaseKey,
};
use super::{Status, secret_name};

/// A revision of a release, as read from its Secret's metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct Revision {
    pub revision: u32,
    pub status: Status,
    pub fingerprint: Option<String>,
    pub owner_uid: Option<String>,
    pub owner_namespace: Option<String>,
    pub run: Option<String>,
    pub rolled_back_by: Option<u32>,
    pub uid: String,
    pub resource_version: String,
    pub created: Option<Timestamp>,
}

impl Revision {
    /// Reads the labels of Helm and Krypton. Returns `None` if this is not a release Secret.
    pub fn from_metadata(meta: &ObjectMeta) -> Option<(ReleaseKey, Self)> {
        let labels = meta.labels.as_ref()?;
        let label = |name: &str| labels.get(name).cloned();
        let key = ReleaseKey::new(meta.namespace.clone()?, label("name")?);
        let revision = label("version")?.parse().ok()?;
        if meta.name.as_deref() != Some(&secret_name(&key.name, revision)) {
            return None;
        }
        Some((
            key,
            Self {
                revision,
                status: label("status").and_then(|status| status.parse().ok())?,
                fingerprint: label(FINGERPRINT_LABEL),
                owner_uid: label(OWNER_UID_LABEL),
                owner_namespace: label(OWNER_NAMESPACE_LABEL),
                run: label(RUN_LABEL),
                rolled_back_by: label(ROLLBACK_LABEL).and_then(|number| number.parse().ok()),
                uid: meta.uid.clone().unwrap_or_default(),
                resource_version: meta.resource_version.clone().unwrap_or_default(),
                created: meta.creation_timestamp.as_ref().map(|time| time.0),
            },
        ))
    }

    /// Returns whether Krypton has never written the revision: krypton-operator or a user created it.
    pub fn is_foreign(&self) -> bool {
        self.run.is_none() && self.fingerprint.is_none() && self.owner_uid.is_none()
    }
}
