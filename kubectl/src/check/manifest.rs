//! Reads a rendered chart, and derives the rights that Helm needs for it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use krypton_helm::releases::manifest;
use serde_json::Value;

use crate::error::KubectlError;
use crate::render::{list_at, text_at};

/// Maximum size of a manifest in bytes.
const MAX_BYTES: usize = 1 << 20;

const HOOK: &str = "/metadata/annotations/helm.sh~1hook";
const RESOURCE_POLICY: &str = "/metadata/annotations/helm.sh~1resource-policy";

/// Verbs that Helm needs for each object. It deletes only objects that it doesn't keep.
const OBJECT_VERBS: [&str; 3] = ["create", "get", "patch"];
/// Helm watches each hook until it is done.
const HOOK_VERBS: [&str; 2] = ["list", "watch"];
/// Helm stores each revision of a release in a Secret, and Krypton labels it.
const RELEASE_VERBS: [&str; 6] = ["create", "delete", "get", "list", "patch", "update"];

/// A kind in a version of its API group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct KindName {
    pub(super) api_version: String,
    pub(super) kind: String,
}

impl KindName {
    pub(super) fn new(api_version: impl Into<String>, kind: impl Into<String>) -> Self {
        Self {
            api_version: api_version.into(),
            kind: kind.into(),
        }
    }

    fn of(object: &Value) -> Option<Self> {
        let text = |pointer| text_at(object, pointer).filter(|text| !text.is_empty());
        Some(Self::new(text("/apiVersion")?, text("/kind")?))
    }

    fn group(&self) -> &str {
        let parts = self.api_version.split_once('/');
        parts.map_or("", |(group, _)| group)
    }
}

impl fmt::Display for KindName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.kind, self.api_version)
    }
}

/// How an API server serves a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ServedKind {
    pub(super) plural: String,
    pub(super) namespaced: bool,
}

pub(super) type ServedKinds = BTreeMap<KindName, ServedKind>;

/// A right that Helm needs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Right {
    pub(super) group: String,
    pub(super) resource: String,
    namespaced: bool,
    /// `None` for all namespaces, and for a cluster-scoped resource.
    pub(super) namespace: Option<String>,
    pub(super) verb: &'static str,
}

impl Right {
    /// Names the objects, as in `deployments.apps in the namespace acme`.
    pub(super) fn objects(&self) -> String {
        let resource = match self.group.as_str() {
            "" => self.resource.clone(),
            group => format!("{}.{group}", self.resource),
        };
        match &self.namespace {
            Some(namespace) => format!("{resource} in the namespace {namespace}"),
            None if self.namespaced => format!("{resource} in all namespaces"),
            None => resource,
        }
    }
}

/// The rights that Helm needs on a cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Requirements<'a> {
    pub(super) rights: BTreeSet<Right>,
    /// Kinds to which `rights` apply.
    pub(super) kinds: BTreeSet<&'a KindName>,
    /// Kinds that neither the cluster nor a CRD of the manifest defines.
    pub(super) unserved: BTreeSet<&'a KindName>,
}

/// A rendered chart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Manifest {
    /// Verbs for the objects of a kind in a namespace. The namespace is `None` if the objects name none.
    verbs: BTreeMap<(KindName, Option<String>), BTreeSet<&'static str>>,
    /// Kinds of its CRDs, which the cluster serves only after the installation.
    own_kinds: ServedKinds,
}

/// Reads a rendered chart from a file, or from standard input if `file` is `-`.
pub(super) fn read(file: &Path) -> Result<Manifest, KubectlError> {
    let (name, text) = match file == Path::new("-") {
        true => ("standard input".to_owned(), read_bounded(io::stdin())),
        false => {
            let text = File::open(file).and_then(read_bounded);
            (file.display().to_string(), text)
        }
    };
    let text =
        text.map_err(|error| KubectlError::Failed(format!("reading {name} failed: {error}")))?;
    Manifest::parse(&text).map_err(|problem| {
        KubectlError::Failed(format!(
            "{name} is not a rendered chart: {problem}; pass the output of helm template"
        ))
    })
}

fn read_bounded(reader: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    reader.take(MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_BYTES {
        let problem = format!("it is larger than {} MiB", MAX_BYTES >> 20);
        return Err(io::Error::other(problem));
    }
    String::from_utf8(bytes).map_err(io::Error::other)
}

impl Manifest {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (objects, unreadable) = manifest::read(text);
        if unreadable > 0 {
            return Err(format!(
                "{unreadable} of its documents are not YAML objects"
            ));
        }
        let mut parsed = Self::default();
        for object in objects.iter().filter(|object| !is_test(object)) {
            let kind = KindName::of(object).ok_or("an object has no apiVersion or no kind")?;
            let namespace = text_at(object, "/metadata/namespace").filter(|it| !it.is_empty());
            let verbs = parsed.verbs.entry((kind, namespace)).or_default();
            verbs.extend(verbs_for(object));
            parsed.own_kinds.extend(kinds_of_crd(object));
        }
        match parsed.verbs.is_empty() {
            true => Err("it contains no object".to_owned()),
            false => Ok(parsed),
        }
    }

    /// Group versions of the objects.
    pub(super) fn api_versions(&self) -> BTreeSet<&str> {
        let kinds = self.verbs.keys().map(|(kind, _)| kind);
        kinds.map(|kind| kind.api_version.as_str()).collect()
    }

    /// Returns the rights that Helm needs on a cluster with these kinds. Without a `release_namespace`, the release may
    /// be in every namespace.
    pub(super) fn requirements(
        &self,
        served: &ServedKinds,
        release_namespace: Option<&str>,
    ) -> Requirements<'_> {
        let mut requirements = Requirements::default();
        for ((kind, namespace), verbs) in &self.verbs {
            let Some(found) = served.get(kind).or_else(|| self.own_kinds.get(kind)) else {
                requirements.unserved.insert(kind);
                continue;
            };
            requirements.kinds.insert(kind);
            let namespace = namespace.as_deref().or(release_namespace);
            let namespace = namespace.filter(|_| found.namespaced);
            requirements.rights.extend(verbs.iter().map(|&verb| Right {
                group: kind.group().to_owned(),
                resource: found.plural.clone(),
                namespaced: found.namespaced,
                namespace: namespace.map(str::to_owned),
                verb,
            }));
        }
        requirements.rights.extend(RELEASE_VERBS.map(|verb| Right {
            group: String::new(),
            resource: "secrets".to_owned(),
            namespaced: true,
            namespace: release_namespace.map(str::to_owned),
            verb,
        }));
        requirements
    }
}

/// Returns whether only `helm test` creates the object.
fn is_test(object: &Value) -> bool {
    let is_test_event = |event: &str| event.trim().starts_with("test");
    text_at(object, HOOK).is_some_and(|events| events.split(',').all(is_test_event))
}

fn verbs_for(object: &Value) -> impl Iterator<Item = &'static str> {
    let is_hook = text_at(object, HOOK).is_some();
    let is_kept = text_at(object, RESOURCE_POLICY).is_some_and(|policy| policy.trim() == "keep");
    // Helm deletes a hook before it creates it again.
    let delete = (is_hook || !is_kept).then_some("delete");
    let watch = is_hook.then_some(HOOK_VERBS).into_iter().flatten();
    OBJECT_VERBS.into_iter().chain(delete).chain(watch)
}

/// Returns the kinds that the object defines if it is a CRD.
fn kinds_of_crd(object: &Value) -> Vec<(KindName, ServedKind)> {
    let text = |pointer: &str| text_at(object, pointer).unwrap_or_default();
    if text("/kind") != "CustomResourceDefinition" {
        return Vec::new();
    }
    let versions = list_at(object, "/spec/versions");
    let names = versions.filter_map(|version| text_at(version, "/name"));
    let kinds = names.map(|version| {
        let api_version = format!("{}/{version}", text("/spec/group"));
        let name = KindName::new(api_version, text("/spec/names/kind"));
        let served = ServedKind {
            plural: text("/spec/names/plural"),
            namespaced: text("/spec/scope") == "Namespaced",
        };
        (name, served)
    });
    kinds.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Release Secrets need these verbs, in addition to the objects of the manifest.
    const RELEASE: &str = "create,delete,get,list,patch,update secrets";

    fn served_kinds() -> ServedKinds {
        let kinds = [
            ("v1", "ConfigMap", "configmaps", true),
            ("v1", "Secret", "secrets", true),
            ("v1", "Namespace", "namespaces", false),
            ("batch/v1", "Job", "jobs", true),
        ];
        let kinds = kinds.map(|(api_version, kind, plural, namespaced)| {
            let plural = plural.to_owned();
            let served = ServedKind { plural, namespaced };
            (KindName::new(api_version, kind), served)
        });
        kinds.into()
    }

    /// Returns the verbs for each group of objects, and the unserved kinds.
    fn needed(text: &str, release_namespace: Option<&str>) -> (BTreeSet<String>, Vec<String>) {
        let manifest = Manifest::parse(text).unwrap();
        let requirements = manifest.requirements(&served_kinds(), release_namespace);
        let mut verbs = BTreeMap::<String, Vec<&str>>::new();
        for right in &requirements.rights {
            verbs.entry(right.objects()).or_default().push(right.verb);
        }
        let rights = verbs
            .iter()
            .map(|(objects, verbs)| format!("{} {objects}", verbs.join(",")));
        let unserved = requirements.unserved.iter().map(ToString::to_string);
        (rights.collect(), unserved.collect())
    }

    #[test]
    fn manifest_determines_needed_rights() {
        let config_map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n";
        let elsewhere = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a, namespace: other}\n";
        let namespace =
            "apiVersion: v1\nkind: Namespace\nmetadata: {name: a, namespace: ignored}\n";
        let hook = "apiVersion: batch/v1\nkind: Job\n\
                    metadata: {name: a, annotations: \
                    {helm.sh/hook: 'test,pre-install', helm.sh/resource-policy: keep}}\n";
        let test = "apiVersion: batch/v1\nkind: Job\n\
                    metadata: {name: a, annotations: {helm.sh/hook: 'test-success, test'}}\n";
        let kept = "apiVersion: v1\nkind: ConfigMap\n\
                    metadata: {name: a, annotations: {helm.sh/resource-policy: keep}}\n";
        let list = "apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: ConfigMap}]\n";
        let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: a}\n";
        let in_acme = "create,delete,get,patch configmaps in the namespace acme";
        let in_other = "create,delete,get,patch configmaps in the namespace other";
        let watched = "create,delete,get,list,patch,watch jobs.batch in the namespace acme";
        let undeleted = "create,get,patch configmaps in the namespace acme";
        let cases: [(&[&str], &[&str]); 8] = [
            (&[config_map], &[in_acme]),
            (&[config_map, config_map, elsewhere], &[in_acme, in_other]),
            (&[namespace], &["create,delete,get,patch namespaces"]),
            (&[hook], &[watched]),
            (&[test, config_map], &[in_acme]),
            (&[kept], &[undeleted]),
            (&[list], &[in_acme]),
            (&[secret], &[]),
        ];
        for (documents, expected) in cases {
            let text = documents.join("---\n");
            let release = format!("{RELEASE} in the namespace acme");
            let expected = expected.iter().map(|right| (*right).to_owned());
            let expected: BTreeSet<String> = expected.chain([release]).collect();
            let (rights, unserved) = needed(&text, Some("acme"));
            assert_eq!(rights, expected, "{text}");
            assert!(unserved.is_empty(), "{text}");
        }
        let (rights, _) = needed(config_map, None);
        let expected = [
            "create,delete,get,patch configmaps in all namespaces".to_owned(),
            format!("{RELEASE} in all namespaces"),
        ];
        assert_eq!(rights, expected.into());
    }

    #[test]
    fn kind_of_own_crd_needs_no_discovery() {
        let thing = "apiVersion: example.org/v1\nkind: Thing\nmetadata: {name: a}\n";
        let crd = "apiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\n\
                   spec: {group: example.org, scope: Cluster, versions: [{name: v1beta1}, {name: v1}], \
                   names: {kind: Thing, plural: things}}\n";
        let (rights, unserved) = needed(thing, None);
        assert_eq!(unserved, ["Thing of example.org/v1"]);
        assert_eq!(rights.len(), 1, "{rights:?}");
        let (rights, unserved) = needed(&format!("{crd}---\n{thing}"), None);
        let crds = "CustomResourceDefinition of apiextensions.k8s.io/v1";
        assert_eq!(unserved, [crds]);
        let expected = "create,delete,get,patch things.example.org";
        assert!(rights.contains(expected), "{rights:?}");
    }

    #[test]
    fn text_without_objects_is_rejected() {
        for (text, expected) in [
            ("", "contains no object"),
            ("# only a comment\n", "contains no object"),
            ("Error: no chart\n", "an object has no apiVersion"),
            ("words\n---\nkind: A\n", "1 of its documents"),
            ("apiVersion: v1\n", "no kind"),
        ] {
            let error = Manifest::parse(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let large = io::repeat(b'#').take(MAX_BYTES as u64 + 1);
        let error = read_bounded(large).unwrap_err();
        assert_eq!(error.to_string(), "it is larger than 1 MiB");
    }
}
