//! The release as Helm stores it.

use std::collections::BTreeMap;
use std::io::{Read, Write as _};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use krypton_helm::releases::{self, Status};

use crate::fault::HelmError;

/// Labels that Helm sets on a release Secret.
const SYSTEM_LABELS: [&str; 6] = [
    "name",
    "owner",
    "status",
    "version",
    "createdAt",
    "modifiedAt",
];
const GZIP_MAGIC: [u8; 3] = [0x1f, 0x8b, 0x08];

/// One revision.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Release {
    pub(crate) name: String,
    pub(crate) info: Info,
    #[serde(skip_serializing_if = "Value::is_null")]
    pub(crate) chart: Value,
    #[serde(skip_serializing_if = "is_empty")]
    pub(crate) config: Value,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) manifest: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) hooks: Vec<Hook>,
    pub(crate) version: u32,
    pub(crate) namespace: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) apply_method: String,
    /// Labels of the Secret. A query includes the system labels, as in Helm.
    #[serde(skip)]
    pub(crate) labels: BTreeMap<String, String>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Info {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) first_deployed: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) last_deployed: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) deleted: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) description: String,
    pub(crate) status: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) notes: String,
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) rollback_revision: u32,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Hook {
    pub(crate) name: String,
    pub(crate) kind: String,
    pub(crate) path: String,
    pub(crate) manifest: String,
    pub(crate) events: Vec<String>,
    pub(crate) last_run: LastRun,
    #[serde(skip_serializing_if = "is_default")]
    pub(crate) weight: i64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) delete_policies: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) output_log_policies: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct LastRun {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) started_at: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) completed_at: String,
    pub(crate) phase: String,
}

fn is_empty(value: &Value) -> bool {
    value.is_null() || value.as_object().is_some_and(serde_json::Map::is_empty)
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Returns the wall time as Go prints it in JSON.
pub(crate) fn now() -> String {
    krypton_runtime::clock::wall().to_string()
}

impl Release {
    pub(crate) fn status(&self) -> Status {
        let Ok(status) = self.info.status.parse();
        status
    }

    pub(crate) fn set_status(&mut self, status: Status, description: impl Into<String>) {
        self.info.status = status.to_string();
        self.info.description = description.into();
    }

    /// Removes the labels that Helm sets itself.
    pub(crate) fn drop_system_labels(&mut self) {
        self.labels
            .retain(|label, _| !SYSTEM_LABELS.contains(&label.as_str()));
    }

    /// Reads a release Secret, with all its labels.
    pub(crate) fn decode(secret: &Value) -> Result<Self, HelmError> {
        let data = secret.pointer("/data/release").and_then(Value::as_str);
        let mut release: Self = unpack(data.unwrap_or_default())?;
        let labels = secret
            .pointer("/metadata/labels")
            .and_then(Value::as_object);
        let labels = labels.into_iter().flatten();
        release.labels = labels
            .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
            .collect();
        Ok(release)
    }

    /// Returns the Secret to write. `time_label` is the label with the time of this write. As in Helm, an older
    /// label of the same name wins.
    pub(crate) fn encode(&self, time_label: &str) -> Result<Value, HelmError> {
        let json = serde_json::to_vec(self).map_err(HelmError::from_error)?;
        let packed = pack(&json).map_err(HelmError::from_error)?;
        let seconds = krypton_runtime::clock::wall().as_second().to_string();
        let mut labels = BTreeMap::from([(time_label.to_owned(), seconds)]);
        labels.extend(self.labels.clone());
        let system_labels = [
            (releases::NAME_LABEL, self.name.clone()),
            (releases::OWNER_LABEL, "helm".to_owned()),
            (releases::STATUS_LABEL, self.info.status.clone()),
            (releases::VERSION_LABEL, self.version.to_string()),
        ];
        labels.extend(system_labels.map(|(label, value)| (label.to_owned(), value)));
        Ok(json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": releases::secret_name(&self.name, self.version),
                "namespace": self.namespace,
                "labels": labels,
            },
            "type": releases::SECRET_TYPE,
            "data": { releases::DATA_KEY: STANDARD.encode(packed) },
        }))
    }
}

/// Encodes a release as Helm does, but compresses fast instead of well.
fn pack(json: &[u8]) -> std::io::Result<String> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(json)?;
    Ok(STANDARD.encode(gzip.finish()?))
}

fn unpack(data: &str) -> Result<Release, HelmError> {
    let inner_text = STANDARD.decode(data).map_err(HelmError::from_error)?;
    let packed = STANDARD.decode(inner_text).map_err(HelmError::from_error)?;
    let mut json = Vec::new();
    if packed.starts_with(&GZIP_MAGIC) {
        MultiGzDecoder::new(packed.as_slice())
            .read_to_end(&mut json)
            .map_err(HelmError::from_error)?;
    } else {
        json = packed;
    }
    serde_json::from_slice(&json).map_err(HelmError::from_error)
}
