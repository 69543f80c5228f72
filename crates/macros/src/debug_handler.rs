//! `#[debug_handler]`: lets the compiler check each part of a handler separately, so that the error points at the
//! part that is wrong.

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use syn::{Error, FnArg, GenericParam, ItemFn, Result, ReturnType, Signature, Type};

/// As many parameters as `Handler` is implemented for.
const MOST_PARAMETERS: usize = 8;

/// The function as it was written, and one check for each of its parts.
pub(crate) fn expand(arguments: &TokenStream, function: &TokenStream) -> TokenStream {
    let asked = questions(arguments, function);
    let asked = asked.unwrap_or_else(Error::into_compile_error);
    quote!(#function #asked)
}

fn questions(arguments: &TokenStream, function: &TokenStream) -> Result<TokenStream> {
    if !arguments.is_empty() {
        let what = "#[debug_handler] takes no arguments";
        return Err(Error::new_spanned(arguments, what));
    }
    let here = "#[debug_handler] belongs on an async function";
    let ItemFn { sig, .. } =
        syn::parse2(function.clone()).map_err(|_| Error::new_spanned(function, here))?;
    if sig.asyncness.is_none() {
        let what = "a handler is an async function: write `async fn`";
        return Err(Error::new_spanned(sig.fn_token, what));
    }
    let types = parameters(&sig)?;
    let extractors = types.iter().map(|ty| {
        let at = at(ty);
        quote_spanned!(at=> ::everbus::__private::is_extractor::<#ty>();)
    });
    let outcome = match &sig.output {
        // The type behind `impl Trait` cannot be named here. The compiler checks it where the
        // function is used.
        ReturnType::Type(_, ty) if !has_impl(ty.to_token_stream()) => {
            let at = at(ty);
            quote_spanned!(at=> ::everbus::__private::is_outcome::<#ty>();)
        }
        ReturnType::Type(..) | ReturnType::Default => TokenStream::new(),
    };
    let name = &sig.ident;
    let at = at(name);
    let values = types.iter().map(|_| quote!(::everbus::__private::value()));
    let sendable = quote_spanned!(at=> ::everbus::__private::is_send(#name(#(#values),*)););
    Ok(quote! {
        const _: fn() = || {
            #(#extractors)*
            #outcome
            #sendable
        };
    })
}

/// The types of the parameters. Refuses parameters that no handler can have.
fn parameters(sig: &Signature) -> Result<Vec<&Type>> {
    let generic =
        "#[debug_handler] cannot look into a generic function: try it with the types filled in";
    let parameter = |p: &&GenericParam| !matches!(p, GenericParam::Lifetime(_));
    if let Some(parameter) = sig.generics.params.iter().find(parameter) {
        return Err(Error::new_spanned(parameter, generic));
    }
    if let Some(ninth) = sig.inputs.iter().nth(MOST_PARAMETERS) {
        let what = format!("a handler has at most {MOST_PARAMETERS} parameters");
        return Err(Error::new_spanned(ninth, what));
    }
    let types = sig.inputs.iter().map(|input| match input {
        FnArg::Receiver(receiver) => {
            let what = "a handler has no `self`: what it shares with others is a State<S>";
            Err(Error::new_spanned(receiver, what))
        }
        FnArg::Typed(typed) if has_impl(typed.ty.to_token_stream()) => {
            Err(Error::new_spanned(&typed.ty, generic))
        }
        FnArg::Typed(typed) => Ok(&*typed.ty),
    });
    types.collect()
}

/// The place of something the user wrote, with the names that the macro sees.
fn at(written: &impl ToTokens) -> Span {
    let first = written.to_token_stream().into_iter().next();
    Span::call_site().located_at(first.map_or_else(Span::call_site, |token| token.span()))
}

fn has_impl(tokens: TokenStream) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == "impl",
        TokenTree::Group(group) => has_impl(group.stream()),
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
    })
}
