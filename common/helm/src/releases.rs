//! Reads Helm's release Secrets without Helm, and marks a revision as failed if its Helm process is gone.

pub mod labels;
pub mod manifest;
pub mod record;
pub mod revision;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::io::{self, Read, Write};
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use base64::read::DecoderReader;
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::{RawValue, to_raw_value};
use thiserror::Error;

mod ambiguous;
pub mod digest;
mod hooks;
mod objects;
mod strict;

pub use ambiguous::check_keys;
pub use digest::{digest, digest_of_json};
pub use hooks::{has_delete_hooks, running_hook};
pub use objects::{
    Declarations, ORIGINALS_NAMESPACE, ObjectId, declares_anywhere, leftovers,
    leftovers_in_default, objects,
};
pub use strict::{UNREADABLE_OBJECT, strict_objects};

/// Type of Helm's release Secrets.
pub const SECRET_TYPE: &str = "helm.sh/release.v1";
/// Key of the payload.
pub const DATA_KEY: &str = "release";
/// Label whose value is always `helm`.
pub const OWNER_LABEL: &str = "owner";
/// Label with the release's name.
pub const NAME_LABEL: &str = "name";
/// Label with the revision in decimal.
pub const VERSION_LABEL: &str = "version";
/// Label with the [`Status`].
pub const STATUS_LABEL: &str = "status";
/// Maximum size of an unpacked payload in bytes. A Secret holds 1 MiB, and real releases are below 10 MiB.
pub(crate) const PAYLOAD_LIMIT: u64 = 64 << 20;
/// Larger payloads are parsed as a stream, because the unpacked JSON takes memory.
const SLICE_MAX: u64 = 256 << 10;
const GZIP_MAGIC: [u8; 3] = [0x1f, 0x8b, 0x08];

/// Returns the name of the Secret of one revision.
pub fn secret_name(release: &str, revision: u32) -> String {
    format!("sh.helm.release.v1.{release}.v{revision}")
}

/// Returns the label selector of a release's Secrets.
pub fn secrets_selector(release: &str) -> String {
    format!("{OWNER_LABEL}=helm,{NAME_LABEL}={release}")
}

/// Status of a revision, as in the label `status`. Unknown values become `Unknown`, so a status of a newer
/// Helm never counts as "no release".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Status {
    #[default]
    Unknown,
    Deployed,
    Uninstalled,
    Superseded,
    Failed,
    Uninstalling,
    PendingInstall,
    PendingUpgrade,
    PendingRollback,
}

impl Status {
    pub const ALL: [Self; 9] = [
        Self::Unknown,
        Self::Deployed,
        Self::Uninstalled,
        Self::Superseded,
        Self::Failed,
        Self::Uninstalling,
        Self::PendingInstall,
        Self::PendingUpgrade,
        Self::PendingRollback,
    ];

    /// Returns the value of the label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Deployed => "deployed",
            Self::Uninstalled => "uninstalled",
            Self::Superseded => "superseded",
            Self::Failed => "failed",
            Self::Uninstalling => "uninstalling",
            Self::PendingInstall => "pending-install",
            Self::PendingUpgrade => "pending-upgrade",
            Self::PendingRollback => "pending-rollback",
        }
    }

    /// Returns whether Helm refuses to change the release, because it assumes that another Helm process is
    /// active.
    pub fn is_pending(self) -> bool {
        matches!(
            self,
            Self::PendingInstall | Self::PendingUpgrade | Self::PendingRollback
        )
    }

    /// Returns whether a Helm process may be active.
    pub fn is_locked(self) -> bool {
        self.is_pending() || self == Self::Uninstalling
    }
}

impl FromStr for Status {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self::ALL
            .into_iter()
            .find(|status| status.as_str() == text)
            .unwrap_or_default())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Kinds whose readiness Krypton watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkloadKind {
    Deployment,
    StatefulSet,
    DaemonSet,
}

impl WorkloadKind {
    const ALL: [Self; 3] = [Self::Deployment, Self::StatefulSet, Self::DaemonSet];

    /// Returns the kind as in objects of `apps/v1`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Deployment => "Deployment",
            Self::StatefulSet => "StatefulSet",
            Self::DaemonSet => "DaemonSet",
        }
    }
}

impl fmt::Display for WorkloadKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A workload in a release's manifest.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Workload {
    pub kind: WorkloadKind,
    pub namespace: String,
    pub name: String,
}

/// The decoded fields of one revision.
#[derive(Clone, PartialEq)]
pub struct Release {
    pub name: String,
    pub namespace: String,
    pub revision: u32,
    pub status: Status,
    pub chart_name: String,
    pub chart_version: String,
    /// Whether Helm applied the revision server-side. Helm requires the same for the next revision.
    pub server_side: bool,
    pub description: String,
    pub workloads: Vec<Workload>,
}

impl fmt::Debug for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Release")
            .field("name", &self.name)
            .field("namespace", &self.namespace)
            .field("revision", &self.revision)
            .field("status", &self.status)
            .field(
                "chart",
                &format_args!("{}:{}", self.chart_name, self.chart_version),
            )
            .finish_non_exhaustive()
    }
}

/// Why a release Secret is not usable. Every message names the Secret.
#[derive(Debug, Error)]
pub enum ReleaseError {
    #[error("Secret {secret} has no data key \"{DATA_KEY}\", so it is not a release of helm")]
    Missing { secret: String },
    #[error(
        "Secret {secret} does not hold a release that can be read; \
         delete it if helm cannot read it either"
    )]
    Unreadable {
        secret: String,
        #[source]
        source: serde_json::Error,
    },
    #[error(
        "Secret {secret} contains revision {revision} of release \"{release}\", but has another name"
    )]
    Mismatch {
        secret: String,
        release: String,
        revision: u32,
    },
    #[error("Secret {secret} has no resourceVersion, so it cannot be changed safely")]
    Unversioned { secret: String },
    #[error("Secret {secret}: the unlocked release could not be encoded")]
    Encode {
        secret: String,
        #[source]
        source: io::Error,
    },
}

#[derive(Deserialize)]
struct StoredRelease {
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    version: u32,
    info: Option<StoredInfo>,
    chart: Option<StoredChart>,
    manifest: Option<String>,
    apply_method: Option<String>,
}

#[derive(Default, Deserialize)]
struct StoredInfo {
    status: Option<String>,
    description: Option<String>,
}

/// Skips templates and files, which make up most of a payload.
#[derive(Default, Deserialize)]
struct StoredChart {
    metadata: Option<StoredMetadata>,
}

#[derive(Default, Deserialize)]
struct StoredMetadata {
    name: Option<String>,
    version: Option<String>,
}

/// Decodes a release Secret.
///
/// # Errors
/// Returns an error if the payload is missing, damaged, larger than 64 MiB unpacked, or does not match the
/// Secret's name.
pub fn decode(secret: &Secret) -> Result<Release, ReleaseError> {
    let stored: StoredRelease = stored(secret)?;
    if secret.metadata.name.as_deref() != Some(&secret_name(&stored.name, stored.version)) {
        let (release, revision) = (stored.name, stored.version);
        return Err(ReleaseError::Mismatch {
            secret: full_name(secret),
            release,
            revision,
        });
    }
    let namespace = secret
        .metadata
        .namespace
        .clone()
        .filter(|name| !name.is_empty())
        .unwrap_or(stored.namespace);
    let info = stored.info.unwrap_or_default();
    let metadata = stored
        .chart
        .unwrap_or_default()
        .metadata
        .unwrap_or_default();
    let Ok(status) = info.status.unwrap_or_default().parse();
    Ok(Release {
        workloads: workloads(&stored.manifest.unwrap_or_default(), &namespace),
        name: stored.name,
        namespace,
        revision: stored.version,
        status,
        chart_name: metadata.name.unwrap_or_default(),
        chart_version: metadata.version.unwrap_or_default(),
        server_side: stored.apply_method.as_deref() == Some("ssa"),
        description: info.description.unwrap_or_default(),
    })
}

/// Reads fields of the payload, without a check of the name.
fn stored<T: DeserializeOwned>(secret: &Secret) -> Result<T, ReleaseError> {
    parse(payload(secret)?).map_err(|source| unreadable(secret, source))
}

/// Parses JSON. Most payloads are small, and a slice is parsed several times faster than a stream.
fn parse<T: DeserializeOwned>(mut json: impl Read) -> serde_json::Result<T> {
    let mut start = Vec::new();
    let length = json.by_ref().take(SLICE_MAX).read_to_end(&mut start);
    match length.map_err(serde_json::Error::io)? as u64 {
        SLICE_MAX => serde_json::from_reader(start.as_slice().chain(json)),
        _ => serde_json::from_slice(&start),
    }
}

fn unreadable(secret: &Secret, source: serde_json::Error) -> ReleaseError {
    ReleaseError::Unreadable {
        secret: full_name(secret),
        source,
    }
}

/// Returns the Secret with its release marked as failed, which lets Helm continue with it. Keeps all other
/// content. Keeps `resourceVersion` as the precondition of the write.
///
/// # Errors
/// See [`decode`]. Also returns an error if the Secret has no `resourceVersion`.
pub fn unlocked(secret: &Secret, description: &str) -> Result<Secret, ReleaseError> {
    let name = full_name(secret);
    if secret
        .metadata
        .resource_version
        .as_deref()
        .is_none_or(str::is_empty)
    {
        return Err(ReleaseError::Unversioned { secret: name });
    }
    let json = marked_failed(payload(secret)?, description);
    let json = json.map_err(|source| unreadable(secret, source))?;
    let packed = pack(&json).map_err(|source| ReleaseError::Encode {
        secret: name,
        source,
    })?;

    let mut unlocked = secret.clone();
    unlocked
        .data
        .get_or_insert_default()
        .insert(DATA_KEY.to_owned(), ByteString(packed));
    let labels = unlocked.metadata.labels.get_or_insert_default();
    labels.insert(STATUS_LABEL.to_owned(), Status::Failed.to_string());
    Ok(unlocked)
}

/// Raw values preserve numbers of any size and the fields of a newer Helm.
fn marked_failed(payload: impl Read, description: &str) -> serde_json::Result<Vec<u8>> {
    type Fields = BTreeMap<String, Box<RawValue>>;
    let mut release: Fields = parse(payload)?;
    let info = release.get("info").map_or("null", |info| info.get());
    let mut info: Fields = serde_json::from_str::<Option<Fields>>(info)?.unwrap_or_default();
    info.insert("status".to_owned(), to_raw_value(Status::Failed.as_str())?);
    info.insert("description".to_owned(), to_raw_value(description)?);
    release.insert("info".to_owned(), to_raw_value(&info)?);
    serde_json::to_vec(&release)
}

fn full_name(secret: &Secret) -> String {
    let namespace = secret.metadata.namespace.as_deref().unwrap_or_default();
    format!(
        "{namespace}/{}",
        secret.metadata.name.as_deref().unwrap_or_default()
    )
}

/// Returns the payload as JSON. Decodes base64, then decompresses gzip if Helm compressed the payload.
pub(crate) fn payload(secret: &Secret) -> Result<impl Read, ReleaseError> {
    let data = secret
        .data
        .as_ref()
        .and_then(|data| data.get(DATA_KEY))
        .ok_or_else(|| ReleaseError::Missing {
            secret: full_name(secret),
        })?;
    let mut decoded = DecoderReader::new(data.0.as_slice(), &STANDARD);
    let mut head = Vec::with_capacity(GZIP_MAGIC.len());
    // A later read reports an error in the base64.
    let is_readable = decoded.by_ref().take(3).read_to_end(&mut head).is_ok();
    let is_compressed = is_readable && head == GZIP_MAGIC;
    let data = io::Cursor::new(head).chain(decoded);
    let json: Box<dyn Read> = if is_compressed {
        Box::new(MultiGzDecoder::new(data))
    } else {
        Box::new(data)
    };
    Ok(io::BufReader::with_capacity(
        32 << 10,
        LimitedPayload {
            inner: json,
            remaining: PAYLOAD_LIMIT,
        },
    ))
}

/// Returns an error at the limit instead of an end of file: a truncated payload must not count as complete.
struct LimitedPayload<R> {
    inner: R,
    remaining: u64,
}

impl<R: Read> Read for LimitedPayload<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.remaining = self.remaining.checked_sub(count as u64).ok_or_else(|| {
            io::Error::other(format!(
                "it unpacks to more than {} MiB",
                PAYLOAD_LIMIT >> 20
            ))
        })?;
        Ok(count)
    }
}

pub fn pack(json: &[u8]) -> io::Result<Vec<u8>> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    gzip.write_all(json)?;
    Ok(STANDARD.encode(gzip.finish()?).into_bytes())
}

/// Returns the workloads in a manifest. Skips invalid documents, because Helm has already applied them.
fn workloads(manifest: &str, namespace: &str) -> Vec<Workload> {
    let (mut workloads, mut objects) = (Vec::new(), Vec::new());
    for document in documents(manifest) {
        // Parsing is expensive, and most documents have other kinds.
        let mut kinds = WorkloadKind::ALL.iter();
        if kinds.any(|kind| document.contains(kind.as_str())) {
            manifest::read_document(&document, &mut objects);
            // Parsed objects need several times the memory of their text. Keep those of one document only.
            let in_document = objects.drain(..);
            workloads.extend(in_document.filter_map(|object| workload(&object, namespace)));
        }
    }
    workloads
}

fn documents(manifest: &str) -> Vec<String> {
    let mut documents = vec![String::new()];
    for line in manifest.split_inclusive('\n') {
        match line.strip_prefix("---") {
            Some(rest) if rest.is_empty() || rest.starts_with(char::is_whitespace) => {
                documents.push(rest.to_owned());
            }
            _ => documents
                .last_mut()
                .expect("there is always one")
                .push_str(line),
        }
    }
    documents
}

fn workload(object: &Value, namespace: &str) -> Option<Workload> {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
    let kind = WorkloadKind::ALL
        .into_iter()
        .find(|kind| text("/kind") == Some(kind.as_str()));
    let (Some("apps/v1"), Some(kind), Some(name)) = (
        text("/apiVersion"),
        kind,
        text("/metadata/name").filter(|name| !name.is_empty()),
    ) else {
        return None;
    };
    let own_namespace = text("/metadata/namespace").filter(|own| !own.is_empty());
    Some(Workload {
        kind,
        namespace: own_namespace.unwrap_or(namespace).to_owned(),
        name: name.to_owned(),
    })
}

/// Returns a Secret with this JSON as its release.
#[cfg(test)]
fn packed_secret(json: &str) -> Secret {
    let data = ByteString(pack(json.as_bytes()).unwrap());
    Secret {
        data: Some([(DATA_KEY.to_owned(), data)].into()),
        ..Secret::default()
    }
}

#[cfg(test)]
mod tests;
