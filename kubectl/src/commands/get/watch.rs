//! `kubectl krypton get … --watch`: what there is, then each change, until Ctrl-C.

use std::collections::BTreeMap;
use std::io::Write;

use futures::{StreamExt as _, TryStreamExt as _};
use jiff::Timestamp;
use krypton_runtime::clock;
use kube::Api;
use kube::api::DynamicObject;
use kube::core::ApiResource;
use kube::runtime::WatchStreamExt as _;
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::Value;

use crate::commands::get::{Get, table_of};
use crate::error::{KubectlError, call_failed};
use crate::home::{Connection, Place, as_value};
use crate::render::{Output, Widths, encode_one};

/// What was shown of each object, by namespace and name: what is listed again is shown where it has changed.
#[derive(Debug, Default)]
struct Shown(BTreeMap<(String, String), String>);

impl Shown {
    /// Whether this is news.
    fn see(&mut self, object: &DynamicObject) -> bool {
        let metadata = &object.metadata;
        let key = (
            metadata.namespace.clone().unwrap_or_default(),
            metadata.name.clone().unwrap_or_default(),
        );
        let version = metadata.resource_version.clone().unwrap_or_default();
        self.0.insert(key, version.clone()) != Some(version)
    }

    fn gone(&mut self, object: &DynamicObject) {
        let metadata = &object.metadata;
        let key = (
            metadata.namespace.clone().unwrap_or_default(),
            metadata.name.clone().unwrap_or_default(),
        );
        self.0.remove(&key);
    }
}

/// Prints until the reader has gone.
pub(crate) async fn run(
    get: &Get,
    kind: &ApiResource,
    place: &Place,
    home: &Connection,
    out: &mut dyn Write,
) -> Result<(), KubectlError> {
    let client = home.client.clone();
    let api: Api<DynamicObject> = match place {
        Place::Cluster => Api::all_with(client, kind),
        Place::Namespace(namespace) => Api::namespaced_with(client, namespace, kind),
    };
    let mut config = watcher::Config::default();
    if let Some(name) = &get.name {
        config = config.fields(&format!("metadata.name={name}"));
    }
    let mut events = watcher(api, config).default_backoff().boxed();
    let mut printer = Printer::new(get, kind);
    let (mut shown, mut listed) = (Shown::default(), Vec::new());
    let failed = |error: watcher::Error| watch_error(error, kind, place, &home.context);
    loop {
        let event = match events.try_next().await {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(()),
            Err(error) => match failed(error) {
                // An apiserver that is away comes back; what may not be read does not.
                KubectlError::Unreachable { .. } | KubectlError::List { .. } => continue,
                error => return Err(error),
            },
        };
        let news = match event {
            Event::Init => {
                listed.clear();
                continue;
            }
            Event::InitApply(object) => {
                if shown.see(&object) {
                    listed.push(object);
                }
                continue;
            }
            Event::InitDone => std::mem::take(&mut listed),
            Event::Apply(object) if shown.see(&object) => vec![object],
            Event::Apply(_) => continue,
            // Its last state, as kubectl shows it.
            Event::Delete(object) => {
                shown.gone(&object);
                vec![object]
            }
        };
        if printer.print(news, out, clock::wall())?.is_gone() {
            return Ok(());
        }
    }
}

fn watch_error(
    error: watcher::Error,
    kind: &ApiResource,
    place: &Place,
    context: &str,
) -> KubectlError {
    match error {
        watcher::Error::InitialListFailed(error) => {
            call_failed(error, "list", kind, place, context)
        }
        watcher::Error::WatchStartFailed(error) | watcher::Error::WatchFailed(error) => {
            call_failed(error, "watch", kind, place, context)
        }
        other => KubectlError::List {
            context: context.to_owned(),
            plural: kind.plural.clone(),
            reason: other.to_string(),
        },
    }
}

/// Whether somebody still reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    Here,
    Gone,
}

impl Reader {
    fn is_gone(self) -> bool {
        self == Self::Gone
    }
}

/// Rows under one header, each column at least as wide as before.
struct Printer<'a> {
    get: &'a Get,
    kind: &'a ApiResource,
    widths: Widths,
}

impl<'a> Printer<'a> {
    fn new(get: &'a Get, kind: &'a ApiResource) -> Self {
        let widths = Widths::default();
        Self { get, kind, widths }
    }

    fn print(
        &mut self,
        objects: Vec<DynamicObject>,
        out: &mut dyn Write,
        now: Timestamp,
    ) -> Result<Reader, KubectlError> {
        let objects: Result<Vec<Value>, _> = objects
            .into_iter()
            .map(|object| as_value(object, self.kind))
            .collect();
        let objects = objects?;
        let text = match self.get.output {
            Some(format @ (Output::Json | Output::Yaml)) => {
                let each = objects.iter().map(|object| encode_one(format, object));
                each.collect::<Result<String, _>>()?
            }
            _ if objects.is_empty() => return Ok(Reader::Here),
            _ => table_of(self.get, &objects, now).render_on(&mut self.widths),
        };
        let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        match written {
            Ok(()) => Ok(Reader::Here),
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(Reader::Gone),
            Err(error) => Err(KubectlError::Write {
                reason: error.to_string(),
            }),
        }
    }
}
