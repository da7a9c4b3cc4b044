//! The kinds of Krypton that commands show or change.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Arg, Command};
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use kube::Resource as _;
use kube::api::DynamicObject;
use kube::core::ApiResource;

use crate::error::KubectlError;
use crate::home::Connection;
use crate::objects::{Objects, Scope};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Cluster,
    Tenant,
    Deployment,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Cluster, Self::Tenant, Self::Deployment];

    /// Names on the command line: singular, plural, and aliases.
    fn names(self) -> &'static [&'static str] {
        match self {
            Self::Cluster => &["cluster", "clusters", "edgecluster", "edgeclusters", "ec"],
            Self::Tenant => &["tenant", "tenants", "tn"],
            Self::Deployment => &[
                "deployment",
                "deployments",
                "kryptondeployment",
                "kryptondeployments",
                "kd",
            ],
        }
    }

    /// Reads a kind with or without its API group, as `-o name` prints it.
    fn parse(text: &str) -> Option<Self> {
        let name = without_group(text);
        let has_name = |kind: &Self| kind.names().contains(&name);
        Self::ALL.into_iter().find(has_name)
    }

    pub(crate) fn singular(kinds: &'static [Self]) -> impl TypedValueParser<Value = KindArg> {
        KindParser { kinds, form: 0 }
    }

    pub(crate) fn plural(kinds: &'static [Self]) -> impl TypedValueParser<Value = KindArg> {
        KindParser { kinds, form: 1 }
    }

    pub(crate) fn resource(self) -> ApiResource {
        match self {
            Self::Cluster => ApiResource::erase::<EdgeCluster>(&()),
            Self::Tenant => ApiResource::erase::<Tenant>(&()),
            Self::Deployment => ApiResource::erase::<KryptonDeployment>(&()),
        }
    }

    /// The scope of this kind's objects: for a kind with namespaces the named one, or the one of the context.
    pub(crate) fn scope(self, namespace: Option<&str>, home: &Connection) -> Scope {
        match self {
            Self::Cluster => Scope::All,
            _ => Scope::Namespace(home.objects_namespace(namespace)),
        }
    }
}

impl Connection {
    /// The EdgeClusters as JSON.
    pub(crate) fn members(&self) -> Objects<DynamicObject> {
        self.untyped(Kind::Cluster.resource(), &Scope::All)
    }
}

fn without_group(text: &str) -> &str {
    let name = text.strip_suffix(&*Tenant::group(&()));
    name.and_then(|name| name.strip_suffix('.')).unwrap_or(text)
}

/// The first argument of a command: `tenant`, or `tenant/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KindArg {
    pub(crate) kind: Kind,
    name: Option<String>,
}

impl KindArg {
    /// Returns the names in all arguments. As for kubectl, the kind precedes all names or each of them.
    pub(crate) fn names(&self, more: &[String]) -> Result<Vec<String>, KubectlError> {
        let mut names: Vec<String> = self.name.iter().cloned().collect();
        for arg in more {
            let name = match (arg.split_once('/'), &self.name) {
                (None, None) => Some(arg.as_str()),
                (Some((kind, name)), Some(_)) => {
                    Some(name).filter(|_| Kind::parse(kind) == Some(self.kind))
                }
                _ => None,
            };
            names.push(name.unwrap_or_default().to_owned());
        }
        match names.iter().any(String::is_empty) {
            true => Err(KubectlError::usage(
                "name objects of one kind, as in 'tenant a b' or 'tenant/a tenant/b'",
            )),
            false => Ok(names),
        }
    }
}

/// Parses one of these kinds, with or without a name.
#[derive(Clone, Debug)]
struct KindParser {
    kinds: &'static [Kind],
    /// Index of the name that the help shows: 0 for singular, 1 for plural.
    form: usize,
}

impl KindParser {
    fn values(&self) -> impl Iterator<Item = PossibleValue> {
        self.kinds.iter().map(|kind| {
            let names = kind.names();
            PossibleValue::new(names[self.form]).aliases(names)
        })
    }
}

impl TypedValueParser for KindParser {
    type Value = KindArg;

    fn parse_ref(
        &self,
        command: &Command,
        arg: Option<&Arg>,
        value: &OsStr,
    ) -> Result<KindArg, clap::Error> {
        let text = value.to_str().unwrap_or_default();
        let (kind, name) = match text.split_once('/') {
            Some((kind, name)) => (kind, Some(name.to_owned())),
            None => (text, None),
        };
        let parser = PossibleValuesParser::new(self.values());
        let kind = parser.parse_ref(command, arg, OsStr::new(without_group(kind)))?;
        let kind = Kind::parse(&kind).expect("the parser accepts only these names");
        Ok(KindArg { kind, name })
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(self.values()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kind_precedes_all_names_or_each() {
        let parse = |args: &[&str]| {
            let (first, more) = args.split_first().unwrap();
            let parser = Kind::singular(&Kind::ALL);
            let kind = parser.parse_ref(&Command::new("get"), None, OsStr::new(first));
            let more: Vec<String> = more.iter().map(|&it| it.to_owned()).collect();
            let names = kind.ok()?.names(&more).ok()?;
            Some(names.join(" "))
        };
        for (args, expected) in [
            (&["tenant"] as &[_], Some("")),
            (&["tenants", "a", "b"], Some("a b")),
            (&["tn/a"], Some("a")),
            (&["tenant.mesh.openkcm.io/a", "tenants/b"], Some("a b")),
            (&["tenant/a", "b"], None),
            (&["tenant", "tenant/a"], None),
            (&["tenant/a", "cluster/b"], None),
            (&["tenant/"], None),
            (&["tenant/a", "tenant/"], None),
            (&["pod/a"], None),
            (&["tenant.apps/a"], None),
        ] {
            assert_eq!(parse(args).as_deref(), expected, "{args:?}");
        }
    }
}
