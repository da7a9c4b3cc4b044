//! A revision of a release, as read from its Secret's metadata.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::labels::{
    FINGERPRINT_LABEL, INSTALL_RUN, OWNER_NAMESPACE_LABEL, OWNER_UID_LABEL, ROLLBACK_LABEL,
    RUN_LABEL, ReleaseKey, UPGRADE_RUN,
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

    /// Returns the owner's generation that the run installed. `None` if an earlier version of Krypton wrote the label.
    pub fn generation(&self) -> Option<i64> {
        let run = self.run.as_deref()?;
        let prefixes = [INSTALL_RUN, UPGRADE_RUN].into_iter();
        let mut ids = prefixes.filter_map(|prefix| run.strip_prefix(prefix));
        let (_, generation) = ids.next()?.split_once('-')?;
        generation.parse().ok()
    }
}

/// Returns the value of [`RUN_LABEL`]. `prefix` is [`INSTALL_RUN`] or [`UPGRADE_RUN`].
pub fn run_label(prefix: &str, random: u64, generation: i64) -> String {
    format!("{prefix}{random:016x}-{generation}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_is_read_from_the_run() {
        let runs = [INSTALL_RUN, UPGRADE_RUN].map(|prefix| run_label(prefix, 7, 12));
        let [install, upgrade] = &runs;
        assert_eq!(upgrade, "upgrade-0000000000000007-12");
        let long = run_label(UPGRADE_RUN, u64::MAX, i64::MAX);
        assert!(long.len() <= 63, "{long} is no label value");
        for (run, generation) in [
            (Some(install.as_str()), Some(12)),
            (Some(upgrade.as_str()), Some(12)),
            (Some(long.as_str()), Some(i64::MAX)),
            (None, None),
            (Some(""), None),
            (Some("upgrade-0123456789abcdef"), None),
            (Some("upgrade-0123456789abcdef-"), None),
            (Some("upgrade-0123456789abcdef-x"), None),
            (Some("rollback-0123456789abcdef-1"), None),
        ] {
            let revision = Revision {
                revision: 1,
                status: Status::Deployed,
                fingerprint: None,
                owner_uid: None,
                owner_namespace: None,
                run: run.map(str::to_owned),
                rolled_back_by: None,
                uid: String::new(),
                resource_version: String::new(),
                created: None,
            };
            assert_eq!(revision.generation(), generation, "{run:?}");
        }
    }
}
