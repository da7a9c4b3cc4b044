//! Which sources have been members, kept in a ConfigMap on home. One that has been, and has no
//! EdgeCluster any more, was dismissed by a person: it is no member again until it has been away, which
//! is seen while the hub runs. So no finalizer is needed, which would outlive the hub.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_runtime::effect;
use krypton_types::names::MEMBERS_CONFIG_MAP;
use kube::api::{Api, PostParams};
use kube::{Client, Error as KubeError};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::membership::pending;
use super::{Found, Origin};

const KEY: &str = "members.json";
/// A ConfigMap holds 1 MiB. What comes after may come back by itself once it is deleted.
const SIZE_MAX: usize = 900 * 1024;
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
pub enum RegisterError {
    #[error(
        "reading ConfigMap {namespace}/{MEMBERS_CONFIG_MAP} failed; check that the hub may get it"
    )]
    Read {
        namespace: String,
        #[source]
        source: KubeError,
    },
    #[error(
        "writing ConfigMap {namespace}/{MEMBERS_CONFIG_MAP} failed; check that the hub may create and update it"
    )]
    Write {
        namespace: String,
        #[source]
        source: KubeError,
    },
    #[error("reading the CRD of EdgeClusters failed")]
    Crd(#[source] KubeError),
    #[error("there is no CRD of EdgeClusters, or it is being deleted")]
    NoCrd,
    #[error("ConfigMap {namespace}/{MEMBERS_CONFIG_MAP}: no answer within {} s", DEADLINE.as_secs())]
    Deadline { namespace: String },
}

/// A source under the name that it asks for.
pub type Entry = (String, Origin);

/// What is on record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Register {
    /// UID of the CRD of EdgeClusters: when it was made anew, nobody was dismissed by a person.
    pub crd: String,
    /// Each with the UID of the object.
    pub entries: BTreeMap<Entry, String>,
}

impl Register {
    /// The entries whose name no EdgeCluster binds to a source any more. One that was made for an agent
    /// since then binds it to none.
    pub fn dismissed(&self, bound: &BTreeMap<String, Option<SourceRef>>) -> BTreeSet<Entry> {
        let entries = self.entries.keys();
        entries
            .filter(|(member, _)| bound.get(member).is_none_or(Option::is_none))
            .cloned()
            .collect()
    }

    /// What is to be on record: every source that is a member, or that asks for the name of one. An
    /// entry goes when its source is seen to be away, or is one of those that were, `departed`, or was
    /// made anew.
    #[must_use]
    pub fn next(
        &self,
        found: &[&Found],
        departed: &BTreeSet<Origin>,
        bound: &BTreeMap<String, Option<SourceRef>>,
    ) -> Self {
        let stays = |((member, origin), uid): &(&Entry, &String)| {
            let mut covering = found
                .iter()
                .filter(|it| it.provider.covers(origin))
                .peekable();
            // Nobody looks for it, or one of them not yet: it is not known to be away.
            covering.peek().is_none()
                || covering.any(|found| {
                    found.listing.sources.as_ref().is_none_or(|sources| {
                        let source = sources.get(origin);
                        source.is_some_and(|source| {
                            let same = source.member == *member && source.uid == **uid;
                            same || pending(source).is_some()
                        })
                    })
                })
        };
        let entries = self.entries.iter().filter(stays);
        let mut entries: BTreeMap<Entry, String> = entries
            .filter(|((_, origin), _)| !departed.contains(origin))
            .map(|(entry, uid)| (entry.clone(), uid.clone()))
            .collect();
        let sources = found
            .iter()
            .filter_map(|found| found.listing.sources.as_deref())
            .flat_map(BTreeMap::values);
        let of_bound =
            sources.filter(|source| bound.get(&source.member).is_some_and(Option::is_some));
        entries.extend(of_bound.map(|source| {
            let entry = (source.member.clone(), source.origin.clone());
            (entry, source.uid.clone())
        }));
        Self {
            crd: self.crd.clone(),
            entries,
        }
    }

    /// What was read beside what has been seen since: an entry too many keeps a member away until it is
    /// wanted anew, one too few brings one back that nobody wants.
    #[must_use]
    pub fn with(&self, read: &Self) -> Self {
        let mut both = self.clone();
        if read.crd == self.crd {
            both.entries.extend(read.entries.clone());
        }
        both
    }

    fn text(&self) -> String {
        let mut kept = Kept {
            crd: self.crd.clone(),
            members: Vec::new(),
        };
        let mut size = 0;
        for ((member, origin), uid) in &self.entries {
            let entry = KeptEntry {
                member: member.clone(),
                source: origin.source_ref(),
                uid: uid.clone(),
            };
            size += serde_json::to_string(&entry).map_or(0, |text| text.len() + 1);
            if size > SIZE_MAX {
                break;
            }
            kept.members.push(entry);
        }
        serde_json::to_string(&kept).unwrap_or_default()
    }

    /// Rubbish is nothing on record.
    fn read(text: &str) -> Self {
        let kept: Kept = serde_json::from_str(text).unwrap_or_default();
        let entries = kept.members.into_iter();
        Self {
            crd: kept.crd,
            entries: entries
                .filter_map(|entry| {
                    let origin = Origin::of(&entry.source)?;
                    Some(((entry.member, origin), entry.uid))
                })
                .collect(),
        }
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Kept {
    crd: String,
    members: Vec<KeptEntry>,
}

#[derive(Debug, Serialize, Deserialize)]
struct KeptEntry {
    member: String,
    source: SourceRef,
    uid: String,
}

/// The register, and the version of the ConfigMap that it was read from or written as.
#[derive(Clone, Debug, Default)]
pub struct OnRecord {
    pub register: Register,
    version: Option<String>,
}

/// Reads it. What was written for another CRD than the present one counts for nothing.
pub async fn load(client: Client, namespace: &str) -> Result<OnRecord, RegisterError> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let found = in_time(namespace, api.get_opt(MEMBERS_CONFIG_MAP)).await?;
    let found = found.map_err(|source| RegisterError::Read {
        namespace: namespace.to_owned(),
        source,
    })?;
    let crd = crd(client, namespace).await?.ok_or(RegisterError::NoCrd)?;
    let Some(found) = found else {
        let register = Register {
            crd,
            ..Register::default()
        };
        return Ok(OnRecord {
            register,
            version: None,
        });
    };
    let text = found.data.unwrap_or_default().remove(KEY);
    let mut register = Register::read(text.as_deref().unwrap_or_default());
    if register.crd != crd {
        register = Register {
            crd,
            ..Register::default()
        };
    }
    Ok(OnRecord {
        register,
        version: found.metadata.resource_version,
    })
}

/// Writes `next` in the place of what is on record.
pub async fn save(
    client: Client,
    namespace: &str,
    on_record: &OnRecord,
    next: Register,
) -> Result<OnRecord, RegisterError> {
    let api: Api<ConfigMap> = Api::namespaced(client, namespace);
    let object = ConfigMap {
        metadata: ObjectMeta {
            name: Some(MEMBERS_CONFIG_MAP.to_owned()),
            resource_version: on_record.version.clone(),
            ..ObjectMeta::default()
        },
        data: Some([(KEY.to_owned(), next.text())].into()),
        ..ConfigMap::default()
    };
    let params = PostParams::default();
    let written = match &on_record.version {
        None => {
            let call = effect!("register.create", api.create(&params, &object));
            in_time(namespace, call).await?
        }
        Some(_) => {
            let call = effect!(
                "register.replace",
                api.replace(MEMBERS_CONFIG_MAP, &params, &object)
            );
            in_time(namespace, call).await?
        }
    };
    let written = written.map_err(|source| RegisterError::Write {
        namespace: namespace.to_owned(),
        source,
    })?;
    Ok(OnRecord {
        register: next,
        version: written.metadata.resource_version,
    })
}

/// UID of the CRD of EdgeClusters; `None` while there is none that stays.
pub async fn crd(client: Client, namespace: &str) -> Result<Option<String>, RegisterError> {
    let api: Api<CustomResourceDefinition> = Api::all(client);
    let name = EdgeCluster::crd().metadata.name.unwrap_or_default();
    let found = in_time(namespace, api.get_metadata_opt(&name)).await?;
    let found = found.map_err(RegisterError::Crd)?;
    Ok(found
        .filter(|crd| crd.metadata.deletion_timestamp.is_none())
        .and_then(|crd| crd.metadata.uid))
}

async fn in_time<T>(namespace: &str, call: impl Future<Output = T>) -> Result<T, RegisterError> {
    let deadline = |_| RegisterError::Deadline {
        namespace: namespace.to_owned(),
    };
    tokio::time::timeout(DEADLINE, call).await.map_err(deadline)
}

#[cfg(test)]
mod tests;
