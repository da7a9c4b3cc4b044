//! Records in a ConfigMap on the home cluster which sources have been members. If a recorded source has no
//! EdgeCluster, a user deleted the EdgeCluster and so dismissed the source. The source becomes a member
//! again only after the running hub has seen it away without its EdgeCluster. This needs no finalizer, which
//! would outlive the hub.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Context as _;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_runtime::call::{ApiError, call};
use krypton_types::names::MEMBERS_CONFIG_MAP;
use kube::api::Api;
use kube::{Client, CustomResourceExt as _};
use serde::{Deserialize, Serialize};

use super::member_names::MemberNames;
use super::{NamedOrigin, Origin, RunningProvider};
use crate::leader::home_writer::create_or_replace;

const KEY: &str = "members.json";
/// A ConfigMap holds 1 MiB. Sources beyond this size are not recorded and may return after a user deletes
/// their EdgeCluster.
const SIZE_MAX: usize = 900 * 1024;

/// The recorded sources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Register {
    /// UID of the CRD of EdgeClusters. If the CRD was recreated, users have not dismissed any source.
    pub crd: String,
    /// UID of the object for each dismissed source, as read after the dismissal. Empty for a member, for a file, and
    /// for an object that was not read since. While no hub leads, or the watch of the objects has failed, a user may
    /// recreate a member's object and then delete its EdgeCluster. The hub must not take that for a new request.
    pub entries: BTreeMap<NamedOrigin, String>,
}

impl Register {
    /// An empty record.
    pub fn new(crd: String) -> Self {
        Self {
            crd,
            entries: BTreeMap::new(),
        }
    }

    /// Returns the entries whose member name has no EdgeCluster with a source. An EdgeCluster that was
    /// created later for an agent has none.
    pub fn dismissed(&self, bound: &BTreeMap<String, Option<SourceRef>>) -> BTreeSet<NamedOrigin> {
        let entries = self.entries.keys();
        entries
            .filter(|(member, _)| bound.get(member).is_none_or(Option::is_none))
            .cloned()
            .collect()
    }

    /// Returns the next record: every source that is a member or requests a member's name. It drops any
    /// other entry if its source is away, is in `departed`, or was recreated.
    #[must_use]
    pub fn next(
        &self,
        providers: &[&RunningProvider],
        departed: &BTreeSet<Origin>,
        bound: &BTreeMap<String, Option<SourceRef>>,
    ) -> Self {
        let dismissed = self.dismissed(bound);
        let names = MemberNames::new(bound, &dismissed);
        let stays = |((member, origin), uid): &(&NamedOrigin, &String)| {
            let mut covering = providers
                .iter()
                .filter(|running| running.provider.covers(origin))
                .peekable();
            // If no provider covers the source, or one has not listed yet, the source is not known to be
            // away.
            covering.peek().is_none()
                || covering.any(|running| {
                    let sources = running.listing.sources.as_ref();
                    let Some(source) = sources.and_then(|sources| sources.get(origin)) else {
                        return running.listing.may_have(origin);
                    };
                    let is_same_object = uid.is_empty() || source.uid == **uid;
                    let is_same = names.name(running, source) == *member && is_same_object;
                    is_same || source.pending().is_some()
                })
        };
        let entries = self.entries.iter().filter(stays);
        let mut entries: BTreeMap<NamedOrigin, String> = entries
            .filter(|((_, origin), _)| !departed.contains(origin))
            .map(|(entry, uid)| (entry.clone(), uid.clone()))
            .collect();
        // Also of a source that is away: it may return before a user deletes its EdgeCluster, and both while no
        // hub leads.
        for (member, source) in bound {
            if let Some(origin) = source.as_ref().and_then(Origin::from_source_ref) {
                entries.insert((member.clone(), origin), String::new());
            }
        }
        for running in providers {
            let sources = running.listing.sources.as_deref().into_iter();
            for source in sources.flat_map(BTreeMap::values) {
                let name = names.name(running, source);
                let is_member = bound.get(&name).is_some_and(Option::is_some);
                let entry = (name, source.origin.clone());
                if is_member {
                    entries.insert(entry, String::new());
                } else if let Some(uid) = entries.get_mut(&entry)
                    && uid.is_empty()
                    && !running.listing.is_outdated(source)
                {
                    uid.clone_from(&source.uid);
                }
            }
        }
        Self {
            crd: self.crd.clone(),
            entries,
        }
    }

    /// Merges the record that was read with the sources seen since. A superfluous entry keeps a member away
    /// until a user requests it again. A missing entry brings back a dismissed member.
    #[must_use]
    pub fn merge(&self, stored: &Self) -> Self {
        let mut merged = self.clone();
        if stored.crd == self.crd {
            merged.entries.extend(stored.entries.clone());
        }
        merged
    }

    fn to_json(&self) -> String {
        let mut document = RegisterDocument {
            crd: self.crd.clone(),
            members: Vec::new(),
        };
        let mut size = 0;
        for ((member, origin), uid) in &self.entries {
            let entry = RegisterDocumentEntry {
                member: member.clone(),
                source: origin.source_ref(),
                uid: uid.clone(),
            };
            size += serde_json::to_string(&entry).map_or(0, |text| text.len() + 1);
            if size > SIZE_MAX {
                break;
            }
            document.members.push(entry);
        }
        serde_json::to_string(&document).unwrap_or_default()
    }

    /// Invalid text counts as an empty record.
    fn from_json(text: &str) -> Self {
        let document: RegisterDocument = serde_json::from_str(text).unwrap_or_default();
        let entries = document.members.into_iter();
        Self {
            crd: document.crd,
            entries: entries
                .filter_map(|entry| {
                    let origin = Origin::from_source_ref(&entry.source)?;
                    Some(((entry.member, origin), entry.uid))
                })
                .collect(),
        }
    }
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct RegisterDocument {
    crd: String,
    members: Vec<RegisterDocumentEntry>,
}

#[derive(Debug, Serialize, Deserialize)]
struct RegisterDocumentEntry {
    member: String,
    source: SourceRef,
    uid: String,
}

/// The register, and the resourceVersion of the ConfigMap that holds it.
#[derive(Clone, Debug, Default)]
pub struct StoredRegister {
    pub register: Register,
    resource_version: Option<String>,
}

/// Loads the register. A record for a different CRD counts as empty.
pub async fn load(client: Client, namespace: &str) -> anyhow::Result<StoredRegister> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let attempt = format!("reading ConfigMap {namespace}/{MEMBERS_CONFIG_MAP}");
    let config_map = call(attempt, api.get_opt(MEMBERS_CONFIG_MAP)).await?;
    let crd = crd(client).await?;
    let crd =
        crd.context("the CRD of EdgeClusters does not exist or is being deleted; install it")?;
    let config_map = config_map.unwrap_or_default();
    let text = config_map.data.unwrap_or_default().remove(KEY);
    let register = Register::from_json(text.as_deref().unwrap_or_default());
    let register = match register.crd == crd {
        true => register,
        false => Register::new(crd),
    };
    Ok(StoredRegister {
        register,
        resource_version: config_map.metadata.resource_version,
    })
}

/// Replaces the record with `next`.
pub async fn save(
    client: Client,
    namespace: &str,
    stored: &StoredRegister,
    next: Register,
) -> anyhow::Result<StoredRegister> {
    let api: Api<ConfigMap> = Api::namespaced(client, namespace);
    let object = ConfigMap {
        metadata: ObjectMeta {
            name: Some(MEMBERS_CONFIG_MAP.to_owned()),
            resource_version: stored.resource_version.clone(),
            ..ObjectMeta::default()
        },
        data: Some([(KEY.to_owned(), next.to_json())].into()),
        ..ConfigMap::default()
    };
    let attempt = format!("writing ConfigMap {namespace}/{MEMBERS_CONFIG_MAP}");
    let written = call(attempt, create_or_replace(&api, &object)).await?;
    Ok(StoredRegister {
        register: next,
        resource_version: written.metadata.resource_version,
    })
}

/// UID of the CRD of EdgeClusters, or `None` if it is missing or being deleted.
pub async fn crd(client: Client) -> Result<Option<String>, ApiError> {
    let api: Api<CustomResourceDefinition> = Api::all(client);
    let crd = call(
        "reading the CRD of EdgeClusters",
        api.get_metadata_opt(EdgeCluster::crd_name()),
    )
    .await?;
    Ok(crd
        .filter(|crd| crd.metadata.deletion_timestamp.is_none())
        .and_then(|crd| crd.metadata.uid))
}

#[cfg(test)]
mod tests;
