//! Translates CryptoEdgeDeployments to KryptonDeployments. Performs no I/O.

use std::collections::BTreeMap;

use krypton_types::names::{self, RELEASE_NAME_MAX};
use serde_json::{Value, json};

/// The objects that CryptoEdgeDeployments refer to.
#[derive(Clone, Debug, Default)]
pub(super) struct OldReferences {
    pub(super) accounts: Vec<Value>,
    pub(super) regions: Vec<Value>,
    /// Namespace in which krypton-operator looked for Regions and kubeconfig Secrets, if the user named it.
    pub(super) operator_namespace: Option<String>,
}

/// Result for one CryptoEdgeDeployment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum MigrationResult {
    #[default]
    WouldBeCreated,
    Created,
    /// A KryptonDeployment of that name exists. Its content may differ.
    Exists,
    /// The translation is impossible, with the reason.
    NotTranslated(String),
    /// The creation failed, with the reason.
    Failed(String),
}

impl MigrationResult {
    pub(super) fn message(&self) -> String {
        match self {
            Self::WouldBeCreated => "would be created".to_owned(),
            Self::Created => "created".to_owned(),
            Self::Exists => "exists, unchanged".to_owned(),
            Self::NotTranslated(reason) => format!("not translated: {reason}"),
            Self::Failed(reason) => format!("not created: {reason}"),
        }
    }

    pub(super) fn is_failure(&self) -> bool {
        matches!(self, Self::NotTranslated(_) | Self::Failed(_))
    }
}

/// A CryptoEdgeDeployment and its translation.
#[derive(Clone, Debug, Default)]
pub(super) struct TranslatedDeployment {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) region: Option<String>,
    /// The Secret with the kubeconfig, for users.
    pub(super) secret: Option<String>,
    /// Namespace and name of the release on the region's cluster, which stay the same.
    pub(super) release: Option<String>,
    /// The KryptonDeployment.
    pub(super) object: Option<Value>,
    pub(super) result: MigrationResult,
    pub(super) notes: Vec<String>,
}

/// Namespace, if it is named, and name of a kubeconfig Secret.
type SecretRef = (Option<String>, String);

/// The spec of a KryptonDeployment, and its kubeconfig Secret.
struct DeploymentSpec {
    account: Value,
    region: Value,
    secret: SecretRef,
    notes: Vec<String>,
}

/// Translates all objects, the oldest first: it keeps a release that several objects share.
pub(super) fn translate(
    deployments: &[Value],
    references: &OldReferences,
    existing: &[Value],
) -> Vec<TranslatedDeployment> {
    let mut sorted: Vec<&Value> = deployments.iter().collect();
    sorted.sort_by_cached_key(|object| {
        let created = text(object, "/metadata/creationTimestamp");
        (created, key(object))
    });
    let mut owners = BTreeMap::new();
    let rows = sorted.into_iter().map(|object| {
        let (namespace, name) = key(object);
        let mut row = TranslatedDeployment {
            namespace,
            name,
            ..TranslatedDeployment::default()
        };
        match translate_spec(object, &row, references) {
            Ok(spec) => add_deployment(&mut row, spec, &mut owners, existing),
            Err(reason) => row.result = MigrationResult::NotTranslated(reason),
        }
        row
    });
    rows.collect()
}

/// Adds the KryptonDeployment with this spec, unless it exists or its release belongs to an older object.
fn add_deployment(
    row: &mut TranslatedDeployment,
    spec: DeploymentSpec,
    owners: &mut BTreeMap<(String, SecretRef), String>,
    existing: &[Value],
) {
    let (namespace, name) = (&row.namespace, &row.name);
    let release = names::deployment_release(name);
    let region = spec.region.get("name").and_then(Value::as_str);
    row.region = region.map(str::to_owned);
    row.secret = Some(match &spec.secret {
        (Some(namespace), secret) => format!("{namespace}/{secret}"),
        (None, secret) => secret.clone(),
    });
    row.release = Some(format!("{name}/{release}"));
    row.notes = spec.notes;
    if format!("ced-{name}").len() > RELEASE_NAME_MAX {
        row.notes.push(format!(
            "its name was too long for krypton-operator, which never installed it; the release will be {release}"
        ));
    }
    let full_name = format!("{namespace}/{name}");
    let owner = owners
        .entry((name.clone(), spec.secret))
        .or_insert_with(|| full_name.clone());
    if *owner != full_name {
        row.result = MigrationResult::NotTranslated(format!(
            "release {release} in namespace {name} of that cluster is also that of {owner}, which is older"
        ));
    } else if existing
        .iter()
        .any(|deployment| key(deployment) == (namespace.clone(), name.clone()))
    {
        row.result = MigrationResult::Exists;
    } else {
        row.object = Some(json!({
            "apiVersion": "mesh.openkcm.io/v1alpha1",
            "kind": "KryptonDeployment",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"account": spec.account, "region": spec.region},
        }));
    }
}

fn translate_spec(
    object: &Value,
    row: &TranslatedDeployment,
    references: &OldReferences,
) -> Result<DeploymentSpec, String> {
    if object.pointer("/metadata/deletionTimestamp").is_some() {
        return Err("it is being deleted".to_owned());
    }
    if !names::is_dns_label(&row.name) {
        let reason = "its name cannot be that of a namespace, which its chart needs";
        return Err(reason.to_owned());
    }
    let spec = match object.pointer("/spec/account").is_some() {
        true => spec_from_inline(object)?,
        false => spec_from_references(object, &row.namespace, references)?,
    };
    match spec.account.get("name").is_some() {
        true => Ok(spec),
        false => Err("it names no account".to_owned()),
    }
}

/// G4 to G6: account and region are in it, as in a KryptonDeployment.
fn spec_from_inline(object: &Value) -> Result<DeploymentSpec, String> {
    let mut notes = Vec::new();
    let account = &object["spec"]["account"];
    let account = text_fields(account, &["name", "displayName", "owner"]);
    let region_spec = &object["spec"]["region"];
    let region_text = |field: &str| text(region_spec, field);
    let name = region_text("/name").ok_or("it names no region")?;
    let mut region = text_fields(region_spec, &["name", "kubeconfigSecretName"]);
    if region_text("/kubeconfig/secret/key").is_some_and(|key| key != names::KUBECONFIG_KEY) {
        notes.push(format!(
            "krypton-operator ignored spec.region.kubeconfig.secret.key and read {:?}; the field is left out",
            names::KUBECONFIG_KEY
        ));
    }
    let secret = match region_text("/kubeconfig/secret/name") {
        Some(secret) => {
            let reference =
                text_fields(&region_spec["kubeconfig"]["secret"], &["name", "namespace"]);
            region["kubeconfig"] = json!({"secret": reference});
            (region_text("/kubeconfig/secret/namespace"), secret)
        }
        None => {
            let secret = region_text("/kubeconfigSecretName");
            (None, secret.unwrap_or_else(|| format!("{name}-kubeconfig")))
        }
    };
    Ok(DeploymentSpec {
        account,
        region,
        secret,
        notes,
    })
}

/// G3: account and region are separate objects.
fn spec_from_references(
    object: &Value,
    namespace: &str,
    references: &OldReferences,
) -> Result<DeploymentSpec, String> {
    let mut notes = Vec::new();
    let account_name = text(object, "/spec/accountRef/name").ok_or("it names no account")?;
    let target_region = text(object, "/spec/targetRegion");
    let region_ref = text(object, "/spec/regionRef/name");
    let name = target_region
        .clone()
        .or(region_ref.clone())
        .ok_or("it names no region")?;
    let region_name = region_ref.or(target_region).unwrap_or_default();
    let accounts = find_objects(&references.accounts, &account_name, Some(namespace));
    let mut account = match accounts.first() {
        Some(account) => text_fields(&account["spec"], &["displayName", "owner"]),
        None => {
            notes.push(format!(
                "AccountNotFound: there is no Account {account_name} in namespace {namespace}; its display name and owner are left out"
            ));
            json!({})
        }
    };
    account["name"] = json!(account_name);
    let (secret_namespace, secret) = match find_region_secret(&region_name, references)? {
        Some(secret) => secret,
        None => {
            let secret = format!("{region_name}-kubeconfig");
            let location = match &references.operator_namespace {
                Some(namespace) => format!("in namespace {namespace}"),
                None => "where the hub looks for kubeconfigs".to_owned(),
            };
            notes.push(format!(
                "Region {region_name} does not exist; the translation assumes Secret {secret}, {location}"
            ));
            (references.operator_namespace.clone(), secret)
        }
    };
    let mut reference = json!({"name": secret});
    if let Some(namespace) = &secret_namespace {
        reference["namespace"] = json!(namespace);
    }
    Ok(DeploymentSpec {
        account,
        region: json!({"name": name, "kubeconfig": {"secret": reference}}),
        secret: (secret_namespace, secret),
        notes,
    })
}

/// Returns the kubeconfig Secret of a Region, or `None` if the Region does not exist.
fn find_region_secret(name: &str, references: &OldReferences) -> Result<Option<SecretRef>, String> {
    let namespace = references.operator_namespace.as_deref();
    match find_objects(&references.regions, name, namespace).as_slice() {
        [] => Ok(None),
        [region] => {
            let secret = text(region, "/spec/kubeconfigSecretName");
            let secret = secret.unwrap_or_else(|| format!("{name}-kubeconfig"));
            Ok(Some((text(region, "/metadata/namespace"), secret)))
        }
        regions => {
            let namespaces: Vec<String> = regions.iter().map(|region| key(region).0).collect();
            Err(format!(
                "there are Regions {name} in the namespaces {}: name the namespace of krypton-operator with --operator-namespace",
                namespaces.join(", ")
            ))
        }
    }
}

fn find_objects<'a>(objects: &'a [Value], name: &str, namespace: Option<&str>) -> Vec<&'a Value> {
    let is_match = |object: &&Value| {
        let (object_namespace, object_name) = key(object);
        object_name == name && namespace.is_none_or(|namespace| object_namespace == namespace)
    };
    objects.iter().filter(is_match).collect()
}

/// Namespace and name.
fn key(object: &Value) -> (String, String) {
    let field = |pointer| text(object, pointer).unwrap_or_default();
    (field("/metadata/namespace"), field("/metadata/name"))
}

fn text(object: &Value, pointer: &str) -> Option<String> {
    let text = object.pointer(pointer).and_then(Value::as_str);
    text.filter(|text| !text.is_empty()).map(str::to_owned)
}

/// Returns the fields that are texts and not empty.
fn text_fields(object: &Value, fields: &[&str]) -> Value {
    let field = |name: &&str| Some(((*name).to_owned(), text(object, &format!("/{name}"))?));
    fields.iter().filter_map(field).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(namespace: &str, name: &str, created: &str, spec: Value) -> Value {
        json!({"metadata": {"namespace": namespace, "name": name, "creationTimestamp": created,
            "finalizers": ["mesh.openkcm.io/cryptoedgedeployment-finalizer"]}, "spec": spec})
    }

    fn named(namespace: &str, name: &str, spec: Value) -> Value {
        json!({"metadata": {"namespace": namespace, "name": name}, "spec": spec})
    }

    fn translate_one(spec: Value, references: &OldReferences) -> TranslatedDeployment {
        let object = deployment("team", "acme", "2026-01-20T00:00:00Z", spec);
        translate(&[object], references, &[]).remove(0)
    }

    fn references() -> OldReferences {
        let acme = json!({"displayName": "Acme", "owner": "ann"});
        let secret = |name: &str| json!({ "kubeconfigSecretName": name });
        OldReferences {
            accounts: vec![
                named("team", "acme-inc", acme),
                named("other", "acme-inc", json!({"displayName": "Wrong"})),
            ],
            regions: vec![
                named("operator", "eu", secret("eu-access")),
                named("operator", "us", json!({})),
                named("operator", "twice", json!({})),
                named("elsewhere", "twice", secret("that")),
            ],
            operator_namespace: None,
        }
    }

    #[test]
    fn g3_references_become_inline_account_and_region() {
        let account = json!({"name": "acme-inc", "displayName": "Acme", "owner": "ann"});
        let by_ref = |region: Value| {
            let mut spec = json!({"accountRef": {"name": "acme-inc"}});
            spec.as_object_mut()
                .unwrap()
                .extend(region.as_object().unwrap().clone());
            spec
        };
        for (spec, region, secret) in [
            (
                by_ref(json!({"targetRegion": "eu"})),
                json!({"name": "eu", "kubeconfig": {"secret": {"name": "eu-access", "namespace": "operator"}}}),
                "operator/eu-access",
            ),
            (
                by_ref(json!({"targetRegion": "europe", "regionRef": {"name": "eu"}})),
                json!({"name": "europe", "kubeconfig": {"secret": {"name": "eu-access", "namespace": "operator"}}}),
                "operator/eu-access",
            ),
            (
                by_ref(json!({"targetRegion": "us"})),
                json!({"name": "us", "kubeconfig": {"secret": {"name": "us-kubeconfig", "namespace": "operator"}}}),
                "operator/us-kubeconfig",
            ),
            // There is no such Region.
            (
                by_ref(json!({"targetRegion": "asia"})),
                json!({"name": "asia", "kubeconfig": {"secret": {"name": "asia-kubeconfig"}}}),
                "asia-kubeconfig",
            ),
        ] {
            let row = translate_one(spec.clone(), &references());
            let object = row.object.unwrap();
            let expected = json!({"account": account, "region": region});
            assert_eq!(object["spec"], expected, "{spec}");
            let expected = json!({"name": "acme", "namespace": "team"});
            assert_eq!(object["metadata"], expected);
            assert_eq!(row.secret.as_deref(), Some(secret));
            assert_eq!(row.release.as_deref(), Some("acme/ced-acme"));
            assert_eq!(row.result, MigrationResult::WouldBeCreated);
            let notes = row.notes;
            let expected = usize::from(secret == "asia-kubeconfig");
            assert_eq!(notes.len(), expected, "{notes:?}");
        }
        let references = OldReferences {
            operator_namespace: Some("elsewhere".to_owned()),
            ..references()
        };
        let row = translate_one(by_ref(json!({"targetRegion": "twice"})), &references);
        assert_eq!(row.secret.as_deref(), Some("elsewhere/that"));
        let unknown_account = json!({"accountRef": {"name": "unknown"}, "targetRegion": "twice"});
        let row = translate_one(unknown_account, &references);
        let object = row.object.unwrap();
        assert_eq!(object["spec"]["account"], json!({"name": "unknown"}));
        let notes = row.notes;
        assert!(notes[0].contains("no Account unknown"), "{notes:?}");
    }

    #[test]
    fn g4_inline_account_and_region_are_kept() {
        let account = json!({"name": "acme-inc", "displayName": "Acme", "owner": "ann"});
        for (region, expected, secret) in [
            (
                json!({"name": "eu"}),
                json!({"name": "eu"}),
                "eu-kubeconfig",
            ),
            (
                json!({"name": "eu", "kubeconfigSecretName": "old"}),
                json!({"name": "eu", "kubeconfigSecretName": "old"}),
                "old",
            ),
            (
                json!({"name": "eu", "kubeconfig": {"secret": {"name": "s", "namespace": "n", "key": "value"}}}),
                json!({"name": "eu", "kubeconfig": {"secret": {"name": "s", "namespace": "n"}}}),
                "n/s",
            ),
            (
                json!({"name": "eu", "kubeconfig": {"secret": {"namespace": "n"}}}),
                json!({"name": "eu"}),
                "eu-kubeconfig",
            ),
        ] {
            let row = translate_one(
                json!({"account": account, "region": region}),
                &OldReferences::default(),
            );
            let spec = json!({"account": account, "region": expected});
            assert_eq!(row.object.unwrap()["spec"], spec, "{region}");
            assert_eq!(row.secret.as_deref(), Some(secret));
            let ignored = region.pointer("/kubeconfig/secret/key").is_some();
            assert_eq!(row.notes.len(), usize::from(ignored));
        }
    }

    #[test]
    fn untranslatable_object_is_left_with_reason() {
        let eu = json!({"name": "eu"});
        let acme = json!({"name": "acme-inc"});
        for (spec, reason) in [
            (json!({"account": {"name": ""}, "region": eu}), "no account"),
            (json!({"account": acme, "region": {}}), "no region"),
            (json!({"targetRegion": "eu"}), "no account"),
            (json!({"accountRef": acme}), "no region"),
            (
                json!({"accountRef": acme, "targetRegion": "twice"}),
                "--operator-namespace",
            ),
            (json!({}), "no account"),
        ] {
            let row = translate_one(spec.clone(), &references());
            assert!(row.result.is_failure() && row.object.is_none(), "{spec}");
            let message = row.result.message();
            assert!(message.contains(reason), "{spec}: {message}");
        }
        let spec = json!({"account": acme, "region": eu});
        let mut deleting = deployment("team", "acme", "2026-01-20T00:00:00Z", spec.clone());
        deleting["metadata"]["deletionTimestamp"] = json!("2026-02-01T00:00:00Z");
        let dotted = deployment("team", "a.b", "2026-01-20T00:00:00Z", spec);
        let rows = translate(&[deleting, dotted], &OldReferences::default(), &[]);
        let messages: Vec<String> = rows.iter().map(|row| row.result.message()).collect();
        let reason = "cannot be that of a namespace";
        assert!(messages[0].contains(reason), "{messages:?}");
        assert!(messages[1].contains("being deleted"), "{messages:?}");
    }

    #[test]
    fn older_deployment_wins_release_and_existing_object_stays() {
        let spec = |region: &str| json!({"account": {"name": "a"}, "region": {"name": region}});
        let (early, late) = ("2026-01-20T00:00:00Z", "2026-01-21T00:00:00Z");
        let deployments = [
            deployment("a", "acme", late, spec("eu")),
            deployment("b", "acme", early, spec("eu")),
            deployment("c", "acme", late, spec("us")),
            deployment("d", "there", late, spec("eu")),
        ];
        let existing = [named("d", "there", json!({}))];
        let rows = translate(&deployments, &OldReferences::default(), &existing);
        let message =
            |row: &TranslatedDeployment| format!("{}: {}", row.namespace, row.result.message());
        let messages: Vec<String> = rows.iter().map(message).collect();
        assert_eq!(messages[0], "b: would be created");
        assert!(messages[1].starts_with("a: "), "{messages:?}");
        assert!(messages[1].contains("that of b/acme"), "{messages:?}");
        assert_eq!(messages[2], "c: would be created");
        assert_eq!(messages[3], "d: exists, unchanged");
        assert!(rows[1].object.is_none() && rows[3].object.is_none());
    }

    #[test]
    fn name_too_long_for_original_gets_note() {
        let long = "a".repeat(50);
        let spec = json!({"account": {"name": "a"}, "region": {"name": "eu"}});
        let object = deployment("team", &long, "2026-01-20T00:00:00Z", spec);
        let row = translate(&[object], &OldReferences::default(), &[]).remove(0);
        assert!(row.object.is_some());
        assert!(row.notes[0].contains("never installed"), "{:?}", row.notes);
    }
}
